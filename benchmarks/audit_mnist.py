"""Audit of a real DP-SGD run on MNIST at epsilon 8, and membership inference with and without DP.

    python benchmarks/audit_mnist.py

Needs the MNIST idx files (TACIT_DATA, or a `shared/data` folder beside the checkout). Writes
results/audit_mnist.md, and figures with their points: audit_mnist_scores.png, audit_membership.svg.
"""

import copy
import csv
import os
import time
from pathlib import Path

import _results
import numpy as np
import torch
from _gaussian_bounds import gaussian_fit, gaussian_threshold_test
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import auditing, datasets
from tacit.report import to_svg_file
from tacit.report.reports import attack_figure

DELTA, EPSILON = 1e-5, 8.0
CANARIES, BATCH, EPOCHS, CLIP = 10_000, 8192, 30, 1.0
RUNS = 5  # audits, each of a run of its own: a lower bound from one run is a random number
POOL, SHADOWS = 4000, 16


def main() -> None:
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    data = datasets.mnist(Path(os.environ.get("TACIT_DATA", beside)))
    started, cpu = time.perf_counter(), time.process_time()
    rows, facts = audited_runs(data)
    seconds = f"{time.perf_counter() - started:.0f} s, {time.process_time() - cpu:.0f} s of CPU"
    attack_rows = membership(data)
    whole = f"{time.perf_counter() - started:.0f} s, {time.process_time() - cpu:.0f} s of CPU"
    _results.write(
        "audit_mnist",
        "Audit of DP-SGD on MNIST",
        ["tacit", "torch", "numpy", "scipy"],
        f"Epsilon {EPSILON:g} at delta {DELTA:g}: MLP 784-100-10, {facts}. White box: {CANARIES:,} "
        f"Dirac canaries, half of them in. {RUNS} audits of one run each: mean of each bound, and "
        "from the lowest to the highest. With a run without canaries and all bounds they took "
        f"{seconds} (threads: {torch.get_num_threads()}).",
        "![scores](audit_mnist_scores.png)",
        _results.table(["bound", "assumes", "epsilon at least", "of the bill"], rows),
        f"Membership inference (LiRA, {SHADOWS} shadow models) on {POOL:,} records, half of them "
        f"trained on; the private model is DP-SGD at epsilon {EPSILON:g}.",
        _results.table(["model", "attack", "AUC", "TPR at 0.1 %", "TPR at 1 %"], attack_rows),
        "![membership](audit_membership.svg)",
        f"Everything took {whole}.",
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.Tanh(), nn.Linear(100, 10))


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def accuracy(model: nn.Module, data: datasets.Dataset) -> float:
    with torch.no_grad():
        guesses = model(torch.tensor(data.x_test)).argmax(1)
    return float((guesses == torch.tensor(data.y_test)).double().mean())


def audited_runs(data: datasets.Dataset) -> tuple[list[tuple[str, ...]], str]:
    """Return the rows of the table of bounds, and a line about the runs."""
    torch.manual_seed(0)
    plain = mlp()
    x, y = torch.tensor(data.x_train), torch.tensor(data.y_train)
    found, refuted, accuracies = [], [], []
    for _ in range(RUNS):
        model = copy.deepcopy(plain)
        canaries = auditing.GradientCanaries(CANARIES, clip_norm=CLIP)
        planted, rows, loss = canaries.plant(model, (x, y), loss_fn)
        private = make_private(planted, rows, loss, len(x) + CANARIES // 2)
        for lot in canaries.watch(private):
            private.step(lot)
        bounds, test = attacked(canaries, private.event, private.epsilon(delta=DELTA))
        found.append(bounds)
        refuted.append(test.is_refuted)
        accuracies.append(accuracy(model, data))
    score_figure(canaries)
    twin = make_private(plain, (x, y), loss_fn, len(x))
    for lot in twin:
        twin.step(lot)
    facts = (
        f"batch {BATCH}, {private.steps} steps, noise multiplier {private.noise_multiplier:.3f}, "
        f"accuracy {100 * np.mean(accuracies):.2f} % with canaries and "
        f"{100 * accuracy(plain, data):.2f} % without (at the same epsilon)"
    )
    table = [
        row(of_one_kind, private.epsilon(delta=DELTA)) for of_one_kind in zip(*found, strict=True)
    ]
    verdict = f"refuted in {sum(refuted)} of {RUNS}"
    return [*table, ("the bill itself", test.assumes, verdict, "")], facts


def make_private(model, data, loss, n_records):
    return tacit.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9),
        data,
        loss,
        batch_size=BATCH,
        epochs=EPOCHS,
        clip_norm=CLIP,
        epsilon=EPSILON,
        delta=DELTA,
        n_records=n_records,
    )


def attacked(canaries, event, bill):
    """Return all bounds from one run, and the test of its bill."""
    scores, inside = canaries.scores, canaries.is_member
    planned = {"delta": DELTA, "expected_epsilon": bill}
    bounds = [
        auditing.one_run(scores, inside, **planned),
        auditing.one_run_gaussian(scores, inside, **planned),
        auditing.threshold_test(scores, inside, delta=DELTA),
        auditing.noise_bound(scores, inside, event, delta=DELTA, reference=canaries.reference),
        gaussian_threshold_test(scores, inside, delta=DELTA),
        gaussian_fit(canaries.sums, inside, delta=DELTA),
    ]
    reference = canaries.reference
    return bounds, auditing.refute_event(
        scores, inside, event, independent=True, reference=reference
    )


def row(bounds, bill) -> tuple[str, ...]:
    lowers = np.array([bound.epsilon_lower for bound in bounds])
    shares = 100 * lowers / bill
    return (
        bounds[0].method,
        bounds[0].assumes,
        f"{lowers.mean():.2f} ({lowers.min():.2f} to {lowers.max():.2f})",
        f"{shares.mean():.0f} % ({shares.min():.0f} to {shares.max():.0f})",
    )


def score_figure(canaries) -> None:
    """Draw histograms of the scores of canaries that were in and out."""
    from matplotlib.figure import Figure

    path = _results.RESULTS / "audit_mnist_scores.png"
    edges = np.linspace(canaries.scores.min(), canaries.scores.max(), 61)
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    lines = ["group,left edge,count"]
    for name, group in (("in", canaries.is_member), ("out", ~canaries.is_member)):
        counts, _ = np.histogram(canaries.scores[group], edges)
        axes.stairs(counts, edges, fill=True, alpha=0.5, label=name)
        lines += [f"{name},{a:.6g},{c}" for a, c in zip(edges, counts, strict=False)]
    axes.set(xlabel="log-likelihood ratio, in against out", ylabel="canaries")
    axes.legend()
    figure.savefig(path, dpi=150)
    path.with_suffix(".csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def membership(data: datasets.Dataset) -> list[tuple[str, ...]]:
    """Run LiRA on a small pool, where an ordinary model overfits; return table rows."""
    x, y = torch.tensor(data.x_train[:POOL]), torch.tensor(data.y_train[:POOL])

    def scores(model: nn.Module) -> np.ndarray:
        with torch.no_grad():
            return auditing.logit_confidence(model(x).numpy(), y.numpy())

    def ordinary(members: np.ndarray, seed: int) -> np.ndarray:
        torch.manual_seed(seed)
        model, rows = mlp(), torch.from_numpy(np.flatnonzero(members))
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        for _ in range(60):
            for part in rows[torch.randperm(len(rows))].split(100):
                optimizer.zero_grad()
                loss_fn(model, (x[part], y[part])).mean().backward()
                optimizer.step()
        return scores(model)

    def private(members: np.ndarray, seed: int) -> np.ndarray:
        torch.manual_seed(seed)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        run = tacit.make_private(
            model,
            optimizer,
            (x[members], y[members]),
            loss_fn,
            batch_size=500,
            steps=200,
            clip_norm=CLIP,
            epsilon=EPSILON,
            delta=DELTA,
            n_records=POOL // 2,
        )
        for lot in run:
            run.step(lot)
        return scores(model)

    curves, rows = {}, []
    for name, train in (("without privacy", ordinary), (f"epsilon {EPSILON:g}", private)):
        members = auditing.flip_coins(POOL, 7)
        target = train(members, 10_000)
        shadows = auditing.train_shadows(train, POOL, n_models=SHADOWS, rng=1)
        for mode in ("online", "offline"):
            curve = auditing.roc(auditing.lira(target, shadows, mode=mode), members)
            found = curve.summary
            tprs = [f"{100 * found[key]:.2f} %" for key in ("tpr_at_0.001", "tpr_at_0.01")]
            rows.append((name, f"LiRA, {mode}", f"{curve.auc:.3f}", *tprs))
            if mode == "online":
                curves[name] = curve
    points = auditing.roc_points(curves, epsilon=EPSILON, delta=DELTA)
    path = _results.RESULTS / "audit_membership.csv"
    with path.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows([("curve", "fpr", "tpr"), *points])
    figure = attack_figure(path, "")
    assert figure is not None
    path.with_suffix(".svg").write_text(to_svg_file(figure), encoding="utf-8")
    return rows


if __name__ == "__main__":
    main()

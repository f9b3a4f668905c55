"""Audit of a real DP-SGD run on MNIST at epsilon 8, and membership inference with and without DP.

    python benchmarks/audit_mnist.py

Needs the MNIST idx files (TACIT_DATA, or a `shared/data` folder beside the checkout). Writes
results/audit_mnist.md, and figures with their points: audit_mnist_scores.png, audit_membership.png.
"""

import copy
import os
import time
from pathlib import Path

import _results
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import auditing, datasets

DELTA, EPSILON = 1e-5, 8.0
CANARIES, BATCH, EPOCHS, CLIP = 10_000, 8192, 30, 1.0
POOL, SHADOWS = 4000, 16


def main() -> None:
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    data = datasets.mnist(Path(os.environ.get("TACIT_DATA", beside)))
    started, cpu = time.perf_counter(), time.process_time()
    rows, facts = audited_run(data)
    seconds = f"{time.perf_counter() - started:.0f} s, {time.process_time() - cpu:.0f} s of CPU"
    attack_rows = membership(data)
    whole = f"{time.perf_counter() - started:.0f} s, {time.process_time() - cpu:.0f} s of CPU"
    _results.write(
        "audit_mnist",
        "Audit of DP-SGD on MNIST",
        ["tacit", "torch", "numpy", "scipy"],
        f"One run, epsilon {EPSILON:g} at delta {DELTA:g}: MLP 784-100-10, {facts}. "
        f"White box: {CANARIES:,} Dirac canaries, half of them in. Both runs and all bounds took "
        f"{seconds} ({torch.get_num_threads()} threads).",
        "![scores](audit_mnist_scores.png)",
        _results.table(["bound", "assumes", "epsilon at least", "of the bill"], rows),
        f"Membership inference (LiRA, {SHADOWS} shadow models) on {POOL:,} records, half of them "
        f"trained on; the private model is DP-SGD at epsilon {EPSILON:g}.",
        _results.table(["model", "attack", "AUC", "TPR at 0.1 %", "TPR at 1 %"], attack_rows),
        "![membership](audit_membership.png)",
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


def audited_run(data: datasets.Dataset) -> tuple[list[tuple[str, ...]], str]:
    """Rows of the table of bounds, and a line about the run."""
    torch.manual_seed(0)
    model = mlp()
    plain = copy.deepcopy(model)
    x, y = torch.tensor(data.x_train), torch.tensor(data.y_train)
    canaries = auditing.GradientCanaries(CANARIES, clip_norm=CLIP, rng=0)
    planted, rows, loss = canaries.plant(model, (x, y), loss_fn)
    n_records = len(x) + CANARIES // 2

    def run(model, data, loss, n_records):
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9)
        return tacit.make_private(
            model,
            optimizer,
            data,
            loss,
            batch_size=BATCH,
            epochs=EPOCHS,
            clip_norm=CLIP,
            epsilon=EPSILON,
            delta=DELTA,
            n_records=n_records,
        )

    private = run(planted, rows, loss, n_records)
    for lot in canaries.watch(private):
        private.step(lot)
    twin = run(plain, (x, y), loss_fn, len(x))
    for lot in twin:
        twin.step(lot)
    bill = private.epsilon(delta=DELTA)
    bounds = all_bounds(canaries, private.event, bill)
    score_figure(canaries)
    facts = (
        f"batch {BATCH}, {private.steps} steps, noise multiplier {private.noise_multiplier:.3f}, "
        f"accuracy {100 * accuracy(model, data):.2f} % with canaries and "
        f"{100 * accuracy(plain, data):.2f} % without (at the same epsilon)"
    )
    return bounds, facts


def all_bounds(canaries, event, bill) -> list[tuple[str, ...]]:
    scores, inside = canaries.scores, canaries.is_member
    planned = {"delta": DELTA, "expected_epsilon": bill}
    found = [
        auditing.one_run(scores, inside, **planned),
        auditing.one_run_gaussian(scores, inside, **planned),
        auditing.threshold_test(scores, inside, delta=DELTA),
        auditing.noise_bound(scores, inside, event, delta=DELTA),
        auditing.gaussian_threshold_test(scores, inside, delta=DELTA),
        auditing.gaussian_fit(canaries.sums, inside, delta=DELTA),
    ]
    rows = [
        (b.method, b.assumes, f"{b.epsilon_lower:.2f}", f"{100 * b.epsilon_lower / bill:.0f} %")
        for b in found
    ]
    test = auditing.refute_event(scores, inside, event, independent=True)
    return [*rows, ("the bill itself", test.assumes, f"p = {test.p_value:.2g}", "not refuted"
            if not test.is_refuted else "REFUTED")]  # fmt: skip


def score_figure(canaries) -> None:
    """Histograms of the scores of canaries that were in and out."""
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
    """LiRA on a small pool, where an ordinary model overfits."""
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
    auditing.roc_figure(
        curves, _results.RESULTS / "audit_membership.png", epsilon=EPSILON, delta=DELTA
    )
    return rows


if __name__ == "__main__":
    main()

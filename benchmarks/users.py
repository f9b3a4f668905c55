"""Accuracy against user-level epsilon: user sampling, record sampling, group privacy, record level.

    TACIT_DATA=... python benchmarks/users.py [--seeds 5] [--processes N] [--runs FILE] [--quick]

`--runs` keeps the accuracy of every run that is over in a file: a benchmark that was stopped goes
on where it was.

Persons are simulated by a stated law. Records are sorted by a random direction of the standardized
features and the label, plus as much normal noise again, and cut into runs whose lengths are
geometric with mean 4: the records of one person are alike. A person has at most 8 records; others
are left out at random. Tables: Adult income, and income in the upper half (ACS), 16,000 training
records each; texts: Reuters, word presence hashed to 2,048 columns. The model is logistic
regression by DP-SGD, with the same rate, steps, clip norm and step size for all methods. Every
method but "record level" is (epsilon, delta)-DP for a person; "record level" is that for one record
only, and is shown for comparison. "advised" is the sampling that `advise_sampling` names from
public facts: numbers of users and records, rate, steps, epsilon and delta.

Also: the price of a mixture against dp_accounting's (if it is installed), and the time of a step.
"""

import argparse
import gzip
import json
import math
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path

import _results as results
import _tables as tables
import numpy as np

EPSILONS, DELTA = (0.25, 1.0, 4.0), 1e-5
MEAN, MOST = 4.0, 8  # records per person
RATE, STEPS, CLIP = 0.02, 150, 0.5
STEP_SIZE = 8.0
METHODS = ("record level", "user sampling", "record sampling", "group privacy")
DATA = ("adult", "acs", "reuters")
RECORDS = 16_000  # of the tables, for training


@lru_cache(maxsize=1)
def load(name: str):
    """Return X, y, X_test, y_test; rows of unit norm at most."""
    if name == "reuters":
        parts = [_reuters(part) for part in ("train", "test")]
        return (*parts[0], *parts[1])
    table = tables.adult_income() if name == "adult" else tables.acs_high_income("one-hot")
    box = table.bounds.box(table.X.shape[1])
    X, y, X_test, y_test = tables.split(table, 0)
    X, y = X[:RECORDS], y[:RECORDS]
    scaled = [np.clip((x - box.center) / box.half, -1, 1) for x in (X, X_test)]
    scaled = [np.c_[x, np.ones(len(x))] / math.sqrt(x.shape[1] / 4 + 1) for x in scaled]
    return scaled[0].astype(np.float32), y, scaled[1].astype(np.float32), y_test


def _reuters(part: str):
    from sklearn.datasets import load_svmlight_file

    with gzip.open(tables.DATA / "text" / f"reuters21578_{part}.svm.gz") as file:
        X, y = load_svmlight_file(file, n_features=17_461)
    X.data[:] = 1.0
    rng = np.random.default_rng(0)
    to, sign = rng.integers(2048, size=X.shape[1]), rng.choice([-1.0, 1.0], size=X.shape[1])
    X = X.tocoo()
    dense = np.zeros((X.shape[0], 2048), np.float32)
    np.add.at(dense, (X.row, to[X.col]), sign[X.col])
    return dense / np.linalg.norm(dense, axis=1, keepdims=True), (y > 0).astype(np.float64)


def persons(X, y, seed: int):
    """Return the id of a person for each record, by the law in the module's docstring."""
    rng = np.random.default_rng(seed)
    z = (X - X.mean(0)) @ rng.normal(size=X.shape[1])
    score = z / z.std() + (y - y.mean()) / y.std() * rng.normal()
    order = np.argsort(score + score.std() * rng.normal(size=len(y)), kind="stable")
    lengths = rng.geometric(1 / MEAN, size=len(y))
    ids = np.empty(len(y), np.int64)
    ids[order] = np.repeat(np.arange(len(lengths)), lengths)[: len(y)]
    return ids


def group_noise(epsilon: float, n_steps: int) -> float:
    """Return the noise multiplier with which a chain of `MOST` neighbors costs `epsilon`.

    (e, d) for one record gives (k e, d (exp(k e) - 1) / (exp(e) - 1)) for k.
    """
    import tacit
    from tacit import events as ev

    one = epsilon / MOST
    delta = DELTA * math.expm1(one) / math.expm1(epsilon)
    step = lambda s: ev.Repeated(ev.PoissonSampled(RATE, ev.Gaussian(s)), n_steps)  # noqa: E731
    return tacit.calibrate(step, epsilon=one, delta=delta)


def accuracy(task: tuple[str, str, float, int]) -> float:
    """Return the accuracy on test records of one private run."""
    import torch

    import tacit
    from tacit.training import Speed, Users

    torch.set_num_threads(1)
    name, method, epsilon, seed = task
    X, y, X_test, y_test = load(name)
    ids = persons(X, y, seed)
    users = {
        "record level": None,
        "user sampling": Users(ids=ids, records_per_user=MOST),
        "record sampling": Users(ids=ids, records_per_user=MOST, sampled="records"),
        "group privacy": Users(ids=ids, records_per_user=MOST, sampled="records"),
    }[method]
    counts = np.bincount(ids)
    counts = counts[counts > 0]
    size = len(counts) if method == "user sampling" else len(y)
    if method in ("record sampling", "group privacy"):
        size = int(np.minimum(counts, MOST).sum())
    torch.manual_seed(seed)
    model = torch.nn.Linear(X.shape[1], 1)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=STEP_SIZE)

    def loss_fn(model, batch):
        x, t = batch
        return torch.nn.functional.binary_cross_entropy_with_logits(
            model(x).squeeze(1), t, reduction="none"
        )

    noise = {"epsilon": epsilon, "delta": DELTA}
    if method == "group privacy":
        noise = {"noise_multiplier": group_noise(epsilon, STEPS)}
    private = tacit.make_private(
        model, optimizer, (torch.from_numpy(X), torch.from_numpy(y).float()), loss_fn,
        batch_size=round(RATE * size), n_records=size, steps=STEPS, clip_norm=CLIP,
        users=users, speed=Speed(check=False), seed=seed, **noise,
    )  # fmt: skip
    mean = tacit.training.EMA(model, decay=0.95)
    for lot in private:
        private.step(lot)
        mean.update()
    with torch.no_grad(), mean.applied():
        right = (model(torch.from_numpy(X_test)).squeeze(1) > 0).numpy() == (y_test > 0)
    return float(right.mean())


def advised(name: str, epsilon: float) -> str:
    """Return the method that public facts advise; those of the first seed stand for all."""
    from tacit.training import advise_sampling

    X, y, _, _ = load(name)
    counts = np.bincount(persons(X, y, 0))
    counts = np.minimum(counts[counts > 0], MOST)
    advice = advise_sampling(
        n_users=len(counts), n_records=int(counts.sum()), records_per_user=MOST, rate=RATE,
        steps=STEPS, epsilon=epsilon, delta=DELTA,
    )  # fmt: skip
    return {"users": "user sampling", "records": "record sampling"}[advice.sampled]


def prices() -> list[list[str]]:
    """Return rows that compare the price of mixtures with dp_accounting's, if it is there."""
    from scipy import stats

    import tacit
    from tacit import events as ev
    from tacit.accounting import for_group

    try:
        from dp_accounting.pld import privacy_loss_distribution as peer
    except ImportError:
        peer = None
    run = ev.Repeated(ev.PoissonSampled(0.01, ev.Gaussian(1.0)), 1000)
    tacit.epsilon(for_group(run, 3), delta=1e-5)
    rows = []
    for k in (1, 2, 4, 10, 20):
        ours = tacit.epsilon(for_group(run, k), delta=1e-5)
        taken = []
        for i in range(1, 8):  # other noise each time, so that nothing is known already
            other = ev.Repeated(ev.PoissonSampled(0.01, ev.Gaussian(1 + i / 1000)), 1000)
            start = time.process_time()
            tacit.epsilon(for_group(other, k), delta=1e-5)
            taken.append(time.process_time() - start)
        seconds = statistics.median(taken)
        row = [str(k), f"{ours:.5f}", f"{seconds:.4f}"]
        if peer is not None:
            start = time.process_time()
            weights = stats.binom(k, 0.01).pmf(range(k + 1))
            theirs = (
                peer.from_mixture_gaussian_mechanism(
                    standard_deviation=1.0, sensitivities=list(range(k + 1)),
                    sampling_probs=weights / weights.sum(), value_discretization_interval=1e-3,
                )
                .self_compose(1000)
                .get_epsilon_for_delta(1e-5)
            )  # fmt: skip
            took = time.process_time() - start
            row += [f"{theirs:.5f}", f"{took:.2f}", f"{took / seconds:.0f}"]
        rows.append(row)
        print(row, flush=True)
    return rows


def step_times() -> list[list[str]]:
    """Return the median time of a step by record, and by user with one record each."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    import tacit

    torch.set_num_threads(1)
    n = 20_000
    ids = np.arange(n)
    two = np.where(ids == 1, 0, ids)  # one user has two records: the general path

    def loss_fn(model, batch):
        x, t = batch
        return F.cross_entropy(model(x), t, reduction="none")

    def asks_for_a_value(model, batch):  # so it cannot be traced
        losses = loss_fn(model, batch)
        return losses if bool(losses.detach().sum() > -1) else losses * 2

    def make(users, width, batch, losses):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 10))
        data = torch.randn(n, width), torch.arange(n) % 10
        return tacit.make_private(
            model, torch.optim.SGD(model.parameters(), lr=0.1), data, losses, batch_size=batch,
            steps=1000, clip_norm=1.0, noise_multiplier=1.0, users=users,
            speed=tacit.training.Speed(check=False),
        )  # fmt: skip

    rows = []
    traced, alone = ("traced program", loss_fn), ("one at a time", asks_for_a_value)
    for (way, losses), width, batch in ((traced, 64, 256), (traced, 784, 256), (alone, 64, 16)):
        runs = [make(users, width, batch, losses) for users in (None, ids, two)]
        lots, times = [iter(run) for run in runs], [[], [], []]
        for _ in range(43):
            for i, run in enumerate(runs):
                lot = next(lots[i])
                start = time.process_time()
                run.step(lot)
                times[i].append(time.process_time() - start)
        record, user, general = (np.array(t[3:]) for t in times)
        rows.append([
            way, f"{width} x {batch}", f"{1e3 * np.median(record):.2f}",
            f"{np.median(user / record):.3f}", f"{np.median(general / record):.3f}",
        ])  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def all_runs(tasks, processes: int, kept: Path | None) -> dict[tuple, float]:
    """Return the accuracy of every task; those in the file `kept` are not run again."""
    found: dict[tuple, float] = {}
    if kept is not None and kept.is_file():
        for line in kept.read_text().splitlines():
            *task, value = json.loads(line)
            found[tuple(task)] = value
    left = [task for task in tasks if task not in found]
    with ProcessPoolExecutor(processes) as pool:
        for task, value in zip(left, pool.map(accuracy, left), strict=True):
            found[task] = value
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps([*task, value]) + "\n")
    return found


def summarized(found: dict[tuple, float], data, epsilons, seeds: int):
    """Return the rows of the table and the mean accuracies.

    The last column is how far the sampling that public facts advise is above group privacy, with
    the standard error of the mean of the differences over seeds.
    """
    rows, means = [], {}
    for name in data:
        for epsilon in epsilons:
            runs = {
                method: [100 * found[name, method, epsilon, seed] for seed in range(seeds)]
                for method in METHODS
            }
            for method in METHODS:
                means[name, method, epsilon] = statistics.mean(runs[method])
            chosen = advised(name, epsilon)
            gains = np.subtract(runs[chosen], runs["group privacy"])
            error = gains.std(ddof=1) / math.sqrt(seeds) if seeds > 1 else math.nan
            shown = [f"{means[name, method, epsilon]:.2f}" for method in METHODS]
            gain = f"{gains.mean():+.2f} ± {error:.2f}"
            rows.append([name, f"{epsilon:g}", *shown, chosen, gain])
    return rows, means


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--runs", type=Path, help="file that keeps the runs that are over")
    parser.add_argument("--quick", action="store_true", help="one table, one seed, two epsilons")
    given = parser.parse_args()
    data = DATA[:1] if given.quick else DATA
    epsilons = (1.0, 4.0) if given.quick else EPSILONS
    seeds = 1 if given.quick else given.seeds
    tasks = [
        (name, method, epsilon, seed)
        for seed in range(seeds) for epsilon in epsilons for name in data for method in METHODS
    ]  # fmt: skip
    found = all_runs(tasks, given.processes, given.runs)
    times, priced = step_times(), prices()
    rows, means = summarized(found, data, epsilons, seeds)
    is_above = all(float(row[-1].split()[0]) > 0 for row in rows)
    picture = "" if given.quick else figure(means)
    results.write(
        "users",
        "Users as the unit of privacy",
        ["torch", "numpy", "scipy"],
        f"Test accuracy in percent, means of {seeds} seeds; delta {DELTA:g}, at most {MOST} "
        f"records a person, rate {RATE:g}, {STEPS} steps, clip norm {CLIP:g}, step size "
        f"{STEP_SIZE:g}. The advised sampling is above group privacy everywhere: "
        f"{'yes' if is_above else 'no'}. Group privacy is a chain of {MOST} neighbors; it has the "
        "lots of record sampling and more noise.",
        results.table(["data", "epsilon", *METHODS, "advised", "above group"], rows),
        picture,
        "Price of k records of one person: rate 0.01, 1,000 steps, noise multiplier 1, delta 1e-5. "
        "CPU seconds, of tacit the median of 7 prices; dp_accounting with its grid at 1e-3.",
        results.table(
            ["k", "epsilon", "s", "dp_accounting", "s", "ratio"][: len(priced[0])], priced
        ),
        "Median CPU time of a step by record in ms, and the median ratio of a step by user with "
        "one record each to the step by record before it: if every user has one, and if one user "
        "in 20,000 has two.",
        results.table(["run", "width x batch", "record, ms", "one each", "general"], times),
    )


def figure(means: dict[tuple[str, str, float], float]) -> str:
    """Draw results/users.svg, a panel for each data set; return the Markdown that shows it."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "tacit"
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(4.6 * len(DATA), 3.4), layout="constrained")
    for number, name in enumerate(DATA, 1):
        axes = drawing.add_subplot(1, len(DATA), number)
        for method in METHODS:
            axes.plot(
                EPSILONS, [means[name, method, e] for e in EPSILONS], marker="o", markersize=3,
                label=method,
            )  # fmt: skip
        axes.set(title=name, xscale="log", xlabel="epsilon of a person", ylabel="accuracy, %")
    axes.legend(fontsize="small")
    drawing.savefig(results.RESULTS / "users.svg", metadata={"Date": None})
    return "![accuracy against epsilon](users.svg)"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

"""Local privacy: ratios, variances, speed, peers, shuffling, and curves on real tables.

    python benchmarks/local.py [--peers PYTHON] [--labels labels.json]

PYTHON is an interpreter with requirements-local.txt installed. labels.json comes from
benchmarks/local_labels.py. Real tables as in benchmarks/_tables.py. Bars (issue "local and shuffled
differential privacy"): ratios at most e^epsilon; variances within 2 % of theory; 10^6 reports over
1,000 options in < 1 s; variance of the choice <= 1.35 times the best known; peers 10 times slower;
shuffle epsilon within 5 % of the numerical bound in < 50 ms.
"""

import argparse
import itertools
import json
import math
import subprocess
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import _results as results
import _tables as tables
import mpmath
import numpy as np
import pandas as pd
from _shuffle_closed_form import shuffled_closed_form
from scipy.special import expit
from scipy.stats import binom

from tacit import local
from tacit.accounting import epsilon as price
from tacit.accounting import shuffled_epsilon
from tacit.local import ORACLES
from tacit.mechanisms import DiscreteLaplaceMechanism
from tacit.regression import Bounds, LogisticRegression

EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0)
DELTA = 1e-6
SEEDS = range(11)
HERE = Path(__file__).resolve().parent


def ratios() -> str:
    """Table of exact worst-case ratios over e^epsilon."""
    mpmath.mp.dps = 40
    randomizers = {
        kind.name: lambda e, kind=kind: kind(epsilon=e, n_options=100) for kind in ORACLES
    }
    randomizers |= {
        "Duchi mean": lambda e: local.DuchiMean(epsilon=e),
        "piecewise mean": lambda e: local.PiecewiseMean(epsilon=e),
        "hybrid mean": lambda e: local.HybridMean(epsilon=e),
        "sampled vector, 10 dimensions": lambda e: local.SampledVector(epsilon=e, n_dimensions=10),
    }
    rows = []
    for name, make in randomizers.items():
        gaps = []
        for epsilon in (0.1, 1.0, 4.0):
            ratio: Fraction = make(epsilon).worst_case_ratio()
            exact = mpmath.mpf(ratio.numerator) / ratio.denominator / mpmath.exp(epsilon)
            assert exact <= 1
            gaps.append(f"{float(1 - exact):.1e}")
        rows.append([name, *gaps])
    return results.table(["randomizer", "1 - ratio / e^0.1", "at epsilon 1", "at epsilon 4"], rows)


def variances(n: int = 10**6) -> str:
    """Empirical variance over theory with a million users, worst option."""
    rng = np.random.default_rng(1)
    weights = np.array([0.3, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05, 0.0])
    options = rng.choice(8, size=n, p=weights)
    truth = np.bincount(options, minlength=8) / n
    rows = []
    for kind in ORACLES:
        oracle = kind(epsilon=1.0, n_options=8)
        reports = oracle.randomize(options, rng=2)
        kinds, counts = np.unique(reports, axis=0, return_counts=True)
        each = np.array([oracle.estimate(report[None]).values for report in kinds])
        spread = counts @ each**2 / n - (counts @ each / n) ** 2 - truth * (1 - truth)
        excess = spread / n / oracle.variance(truth, n) - 1
        rows.append([oracle.name, f"{abs(excess).max():.2%}"])
    values = rng.uniform(-1, 1, n)
    for kind in (local.DuchiMean, local.PiecewiseMean, local.HybridMean):
        mean = kind(epsilon=1.0)
        noise = np.var(mean.randomize(values, rng=3)) - np.var(values)
        rows.append([kind.__name__, f"{abs(noise / n / mean.variance(values, n) - 1):.2%}"])
    return results.table(["randomizer, epsilon 1", "largest distance from theory"], rows)


def speed(n: int = 10**6, k: int = 1000) -> str:
    """Seconds to estimate a million reports over a thousand options."""
    rng, rows = np.random.default_rng(0), []
    for kind in ORACLES:
        oracle = kind(epsilon=1.0, n_options=k)
        one = oracle.randomize(0, rng=0)
        if one.dtype == np.uint8:
            reports = rng.integers(0, 256, size=(n, len(one)), dtype=np.uint8)
        else:
            reports = oracle.randomize(rng.integers(0, k, n), rng=0)
        seconds = results.cpu_seconds(lambda o=oracle, r=reports: o.estimate(r), repeats=3)
        rows.append([oracle.name, f"{seconds:.2f} s", oracle.report_bits])
    return results.table(["oracle", "CPU time", "bits per report"], rows)


def best_known(k: int, epsilon: float) -> float:
    """Least mean variance of the published oracles, subset selection at every size."""
    e = math.exp(epsilon)

    def mean_variance(p, q):
        return (p * (1 - p) / k + (1 - 1 / k) * q * (1 - q)) / (p - q) ** 2

    sizes = np.arange(1, k)
    p = sizes * e / (sizes * e + k - sizes)
    hashing = [mean_variance(e / (e + g - 1), 1 / g) for g in range(2, math.ceil(e) + 3)]
    return min(
        float(mean_variance(p, (sizes - p) / (k - 1)).min()),
        mean_variance(0.5, 1 / (e + 1)),
        *hashing,
    )


def choice() -> str:
    """Variance of the chosen oracle over the best known, for a grid of settings."""
    options, epsilons = (2, 3, 10, 32, 100, 1000, 10_000), (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
    rows = []
    for k in options:
        cells = []
        for epsilon in epsilons:
            oracle = local.choose_oracle(k, epsilon)
            share = oracle.mean_variance / best_known(k, epsilon)
            cells.append(f"{oracle.name} {share:.3f}")
        rows.append([f"{k:,}", *cells])
    return results.table(["options", *(f"epsilon {e:g}" for e in epsilons)], rows)


OURS = {
    "GRR": local.RandomizedResponse,
    "DE": local.RandomizedResponse,
    "OUE": local.OptimizedUnary,
    "OLH": local.LocalHashing,
    "HR": local.HadamardResponse,
}


def peers(
    python: str, n: int = 20_000, k: int = 100, epsilon: float = 1.0, repeats: int = 12
) -> str:
    """Error and time beside multi-freq-ldpy and pure-ldp, same data and settings."""
    command = [python, "-W", "ignore", HERE / "_local_peers.py", n, k, epsilon, repeats]
    answer = subprocess.check_output([str(part) for part in command], text=True)
    options = np.random.default_rng(0).zipf(1.5, n) % k
    truth = np.bincount(options, minlength=k) / n
    rows = []
    answers = json.loads(answer.splitlines()[-1])
    versions = answers.pop("versions")
    for name, found in answers.items():
        if "error" in found:
            rows.append([name, "does not run: " + found["error"], "", "", "", ""])
            continue
        oracle = OURS[name.split()[-1]](epsilon=epsilon, n_options=k)
        is_clipped = name.startswith("multi")  # its estimates are clipped and normalized
        errors = []
        for seed in range(5 * repeats):
            estimate = oracle.estimate(oracle.randomize(options, rng=seed))
            values = estimate.as_probabilities() if is_clipped else estimate.values
            errors.append(np.mean((values - truth) ** 2))
        reports = oracle.randomize(options, rng=0)
        start = time.process_time()
        for _ in range(20):
            oracle.estimate(reports)
        seconds = (time.process_time() - start) / 20
        rows.append([
            name, f"{found['mse']:.3g}", f"{np.mean(errors):.3g}",
            f"{found['seconds'] * 1e3:.2f} ms", f"{seconds * 1e3:.2f} ms",
            f"{found['seconds'] / seconds:.0f}",
        ])  # fmt: skip
    header = ["oracle", "their error", "our error", "their time", "our time", "times faster"]
    theirs, ours = ((k * runs / 2) ** -0.5 for runs in (repeats, 5 * repeats))
    text = (
        f"{versions}. {n:,} reports, {k} options, epsilon {epsilon:g}; mean squared error over "
        f"options, and CPU time of the estimate. Their errors are means of {repeats} runs, ours of "
        f"{5 * repeats}: relative standard errors of about {theirs:.0%} and {ours:.0%} if options "
        "are independent. multi-freq-ldpy clips its estimates at 0 and divides by their sum; ours "
        "are then projected on the simplex. pure-ldp and ours are unbiased otherwise.\n\n"
    )
    note = (
        "\n\nThe unbiased oracles of both have the same theoretical error, except local hashing: a "
        "prime number of hash values (3) costs 2 % over the best one (4)."
    )
    return text + results.table(header, rows) + note


def fine_epsilon(local_epsilon: float, n: int, delta: float) -> float:
    """The numerical bound itself: every number of clones, no grouping, by bisection on delta."""
    gamma, e = math.exp(-local_epsilon), math.exp(local_epsilon)
    mean, spread = (n - 1) * gamma, 9 * math.sqrt(n * gamma)
    counts = np.arange(max(0, math.floor(mean - spread)), min(n - 1, math.ceil(mean + spread)) + 1)
    if len(counts) > 40_000:  # every hundredth or so; neighbors differ by parts in a million
        counts = counts[:: len(counts) // 20_000]
    weights = binom.pmf(counts, n - 1, gamma)
    weights /= weights.sum()

    def delta_at(epsilon: float) -> float:
        growth = math.exp(epsilon)
        first = np.floor((growth * e - 1) / ((e - 1) * (growth + 1)) * (counts + 1)) + 1
        tail, mass = binom.sf(first - 1, counts, 0.5), binom.pmf(first - 1, counts, 0.5)
        given = (e - growth) / (e + 1) * mass - (growth - 1) * tail
        return float(weights @ np.maximum(given, 0))

    low, high = 0.0, local_epsilon
    for _ in range(25):
        middle = (low + high) / 2
        low, high = (low, middle) if delta_at(middle) <= delta else (middle, high)
    return high


def shuffling() -> str:
    """Shuffle epsilon beside the ungrouped bound and the closed form."""
    rows = []
    for local_epsilon, power in itertools.product((1.0, 3.0), range(3, 9)):
        n = 10**power
        delta = 1 / (10 * n)
        found = shuffled_epsilon(local_epsilon, n, delta=delta)
        seconds = results.cpu_seconds(
            lambda e=local_epsilon, n=n, d=delta: shuffled_epsilon(e, n, delta=d), repeats=5
        )
        fine = fine_epsilon(local_epsilon, n, delta)
        closed = shuffled_closed_form(local_epsilon, n, delta=delta)
        rows.append([
            f"{local_epsilon:g}", f"10^{power}", f"{delta:g}", f"{found:.5g}", f"{fine:.5g}",
            f"{found / fine - 1:+.2%}", f"{closed:.4g}", f"{seconds * 1e3:.0f} ms",
        ])  # fmt: skip
    header = [
        "local epsilon",
        "n",
        "delta",
        "tacit",
        "ungrouped",
        "difference",
        "closed form",
        "time",
    ]
    return (
        'In "ungrouped" every number of clones counts as itself; above 40,000 of them, one in many '
        "stands for its neighbors.\n\n" + results.table(header, rows)
    )


def local_for(make: Callable[[float], object], epsilon: float, n: int) -> object:
    """The randomizer with the largest local epsilon whose shuffled reports cost `epsilon`."""
    low, high = epsilon, 14.0
    for _ in range(25):
        middle = (low + high) / 2
        cost = price(make(middle).shuffled(n), delta=DELTA)
        low, high = (middle, high) if cost <= epsilon else (low, middle)
    return make(low)


def shuffled_oracle(k: int, epsilon: float, n: int) -> local.FrequencyOracle:
    """The oracle of least variance whose shuffled reports cost `epsilon`."""
    found = [
        local_for(lambda e, kind=kind: kind(epsilon=e, n_options=k), epsilon, n)
        for kind in (local.RandomizedResponse, local.OptimizedUnary)
    ]
    return min(found, key=lambda oracle: oracle.mean_variance)


def histogram_errors(options: np.ndarray, k: int) -> dict[str, list[float]]:
    """Median total variation distance from the true frequencies, for each epsilon."""
    n = len(options)
    counts = np.bincount(options, minlength=k)
    curves: dict[str, list[float]] = {"local": [], "shuffled": [], "central": []}
    for epsilon in EPSILONS:
        oracles = {
            "local": local.choose_oracle(k, epsilon),
            "shuffled": shuffled_oracle(k, epsilon, n),
        }
        for name, oracle in oracles.items():
            found = [
                oracle.estimate(oracle.randomize(options, rng=seed)).as_probabilities()
                for seed in SEEDS
            ]
            curves[name].append(float(np.median([distance(f, counts / n) for f in found])))
        laplace = DiscreteLaplaceMechanism(epsilon, l1_sensitivity=1)
        found = [np.maximum(laplace.release(counts, rng=seed), 0) for seed in SEEDS]
        central = [distance(f / f.sum(), counts / n) for f in found]
        curves["central"].append(float(np.median(central)))
    return curves


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Total variation distance."""
    return float(abs(one - other).sum() / 2)


def predictions(
    X: np.ndarray, y: np.ndarray, X_new: np.ndarray, epsilon: float, seed: int
) -> dict[str, np.ndarray]:
    """Probabilities at `X_new` of a logistic model learned in the three ways."""
    d = X.shape[1]
    one = local.LocalSGD(epsilon=epsilon, n_features=d)
    mixed = local_for(lambda e: local.LocalSGD(epsilon=e, n_features=d), epsilon, len(y))
    central = LogisticRegression(
        epsilon=epsilon, delta=DELTA, bounds=Bounds(-1, 1), random_state=seed
    ).fit(X, y)
    return {
        "local": one.fit(X, y, rng=seed).predict(X_new),
        "shuffled": mixed.fit(X, y, rng=seed).predict(X_new),
        "central": central.predict_proba(X_new)[:, 1],
    }


def plain_logit(X: np.ndarray, y: np.ndarray, X_new: np.ndarray) -> np.ndarray:
    """Probabilities of the logistic model without privacy."""
    rows = np.column_stack([X, np.ones(len(X))])
    weights = np.zeros(rows.shape[1])
    for _ in range(25):
        p = expit(rows @ weights)
        hessian = (rows * (p * (1 - p))[:, None]).T @ rows + 1e-9 * np.eye(len(weights))
        weights -= np.linalg.solve(hessian, rows.T @ (p - y))
    return expit(np.column_stack([X_new, np.ones(len(X_new))]) @ weights)


def curves_table(curves: dict[str, list[float]], form: str) -> str:
    rows = [[name, *(f"{value:{form}}" for value in values)] for name, values in curves.items()]
    return results.table(["", *(f"epsilon {e:g}" for e in EPSILONS)], rows)


def adult() -> tuple[str, dict[str, dict[str, list[float]]]]:
    """Adult: the histogram of education by income, and the accuracy of an income model."""
    frame = tables._adult()
    options = ((frame["education_num"] - 1) * 2 + frame["income"]).to_numpy(np.int64)
    histogram = histogram_errors(options, 32)
    X = np.column_stack([
        (frame["age"].clip(17, 90) - 17) / 73 * 2 - 1,
        (frame["education_num"] - 1) / 15 * 2 - 1,
        (frame["hours"].clip(1, 99) - 1) / 98 * 2 - 1,
        np.where(frame["sex"] == "Male", 1.0, -1.0),
        np.where(frame["marital"] == "Married-civ-spouse", 1.0, -1.0),
        np.where(frame["gain"] > 5000, 1.0, -1.0),
    ]).astype(np.float64)  # fmt: skip
    y = frame["income"].to_numpy(np.float64)
    accuracy: dict[str, list[float]] = {"local": [], "shuffled": [], "central": []}
    plain = []
    for epsilon in EPSILONS:
        scores: dict[str, list[float]] = {name: [] for name in accuracy}
        for seed in SEEDS:
            order = np.random.default_rng(seed).permutation(len(y))
            train, test = np.split(order, [len(order) * 4 // 5])
            found = predictions(X[train], y[train], X[test], epsilon, seed)
            for name, p in found.items():
                scores[name].append(float(np.mean((p > 0.5) == y[test])))
            if epsilon == EPSILONS[0]:
                p = plain_logit(X[train], y[train], X[test])
                plain.append(float(np.mean((p > 0.5) == y[test])))
        for name, values in scores.items():
            accuracy[name].append(float(np.median(values)))
    text = (
        f"48,842 persons, delta {DELTA:g}, median of {len(SEEDS)} seeds.\n\n"
        "Education by income, 32 cells: total variation distance from the true histogram.\n\n"
        + curves_table(histogram, ".4f")
        + "\n\nIncome above 50,000 dollars by six features: accuracy on test rows "
        f'({np.median(plain):.2%} without privacy, {1 - y.mean():.2%} for "never").\n\n'
        + curves_table(accuracy, ".2%")
    )
    return text, {"histogram": histogram, "accuracy": accuracy}


def married() -> tuple[str, dict[str, list[float]], dict[str, np.ndarray]]:
    """P(married) by education: mean error of the fitted probabilities, and the curves at 1."""
    frame = pd.read_csv(tables.DATA / "census" / "fulton_pums5.csv.gz")
    X = ((frame["educ"].to_numpy(np.float64) - 1) / 15 * 2 - 1)[:, None]
    y = frame["married"].to_numpy(np.float64)
    levels = np.linspace(-1, 1, 16)[:, None]
    plain = plain_logit(X, y, levels)
    weights = np.bincount(frame["educ"] - 1, minlength=16) / len(frame)
    curves: dict[str, list[float]] = {"local": [], "shuffled": [], "central": []}
    drawn: dict[str, np.ndarray] = {"without privacy": plain}
    for epsilon in EPSILONS:
        found = [predictions(X, y, levels, epsilon, seed) for seed in SEEDS]
        for name, values in curves.items():
            errors = [weights @ abs(one[name] - plain) for one in found]
            values.append(float(np.median(errors)))
            if epsilon == 1.0:
                middle = int(np.argsort(errors)[len(errors) // 2])
                drawn[name] = found[middle][name]
    text = (
        f"{len(frame):,} persons, delta {DELTA:g}, logistic model of one feature, median of "
        f"{len(SEEDS)} seeds: mean distance of the fitted probability from that without privacy."
        " The learning rate and the number of groups of `LocalSGD` are its defaults, which were "
        "fixed before this table was made. With little noise its error is that of one pass of "
        "gradient descent, not of privacy.\n\n" + curves_table(curves, ".4f")
    )
    return text, curves, drawn


COLORS = {
    "local": "#c0392b",
    "shuffled": "#d68910",
    "central": "#1f618d",
    "without privacy": "#222",
}


def figure(name: str, panels: list[tuple[str, str, np.ndarray, dict[str, object], bool]]) -> str:
    """Draw panels side by side into results/NAME.svg; returns the Markdown that shows it."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "tacit"
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(4.6 * len(panels), 3.4), layout="constrained")
    axes = np.atleast_1d(drawing.subplots(1, len(panels)))
    for ax, (title, label, x, curves, is_log) in zip(axes, panels, strict=True):
        for curve, values in curves.items():
            ax.plot(x, values, "o-", ms=3.5, lw=1.6, label=curve, color=COLORS[curve])
        ax.set(title=title, xlabel=label)
        if is_log:
            ax.set_xscale("log")
            ax.set_yscale("log")
            ax.set_xticks(x, [f"{value:g}" for value in x])
            ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.legend(frameon=False)
    drawing.savefig(results.RESULTS / f"{name}.svg", metadata={"Date": None})
    return f"![{name}]({name}.svg)"


def labels(path: Path) -> str:
    """Accuracy of label privacy on MNIST, from the file that local_labels.py wrote."""
    data = json.loads(path.read_text())
    frame = pd.DataFrame(data["runs"])
    frame["epsilon"] = frame["epsilon"].astype(object).where(frame["epsilon"].notna(), "none")
    rows = []
    for epsilon, group in frame.groupby("epsilon", sort=False):
        cells = [group[m].dropna() for m in ("one stage", "two stages")]
        shown = [f"{cell.mean():.2%}" if len(cell) else "" for cell in cells]
        rows.append([epsilon, *shown, len(group)])
    text = (
        "A network of three convolutions (220,000 weights), 60,000 images with randomized labels, "
        f"forward-corrected loss, {data['epochs']} epochs, torch {data['torch']}; accuracy on the "
        "10,000 test images, on which nothing was tuned. The figures of Ghazi et al. 2021 "
        "(arXiv:2102.06062) are not repeated here: their table was not at hand to be checked."
        "\n\n"
    )
    return text + results.table(["epsilon", "one stage", "two stages", "seeds"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", help="interpreter with the peers installed")
    parser.add_argument("--labels", type=Path, help="output of local_labels.py")
    options = parser.parse_args()
    adult_text, adult_curves = adult()
    married_text, married_curves, drawn = married()
    x = np.array(EPSILONS)
    first = figure("local_curves", [
        ("Adult: histogram error", "epsilon", x, adult_curves["histogram"], True),
        ("P(married): error", "epsilon", x, married_curves, True),
    ])  # fmt: skip
    second = figure(
        "local_married",
        [("P(married), epsilon 1", "education, 1 to 16", np.arange(1, 17), drawn, False)],
    )
    blocks = [
        "## Exact ratios\n\nDistance of the largest ratio of the drawn law below e^epsilon.\n\n"
        + ratios(),
        "## Variances with 10^6 users\n\n" + variances(),
        "## Time for 10^6 reports over 1,000 options\n\n" + speed(),
        "## The choice\n\nChosen oracle, and its mean variance over the best known.\n\n" + choice(),
        "## Shuffling\n\n" + shuffling(),
        "## Adult\n\n" + adult_text,
        "## P(married) by education\n\n" + married_text + f"\n\n{first}\n\n{second}",
    ]
    if options.peers:
        blocks.append("## Peers\n\n" + peers(options.peers))
    if options.labels:
        blocks.append("## Label privacy on MNIST\n\n" + labels(options.labels))
    results.write("local", "Local and shuffled privacy", ["numpy", "scipy"], *blocks)


if __name__ == "__main__":
    main()

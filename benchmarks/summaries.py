"""Coverage and width of the intervals of `tacit.summaries`, over many simulated tables.

    python benchmarks/summaries.py [--repeats 1000]

Every table has 5,000 records drawn from a known population, so that the true value is known. An
interval *covers* if it contains the true value: that of the population, or that of the table for
counts. The reference is the shortest valid interval that we could derive for the same guarantee
(pure DP, a record is added or removed, the number of records is private). It is granted knowledge
that no private interval has: the exact law of its error, so that it covers 95 % of the tables
without any margin. The last column says which release it uses. For quantiles, whose intervals end
at edges of cells, it is granted noise that happens to be 0. Ages are declared to be whole numbers
(`step=1`), so the length of the interval of an age jumps by whole years.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from _results import table, write
from scipy.special import ndtr, ndtri
from scipy.stats import rankdata

from tacit import summaries
from tacit.summaries import Statistic
from tacit.summaries.column_values import Range
from tacit.summaries.payment import Terms
from tacit.summaries.quantiles import (
    ConsistentCounts,
    _node_variances,
    choose_tree,
    grid_size,
    quantile_interval,
)

N_RECORDS = 5_000
EPSILONS = (0.1, 1.0, 8.0)
HEADER = (
    "statistic",
    "epsilon",
    "coverage",
    "median width",
    "shortest",
    "ratio",
    "the shortest is",
)
BOUNDS = (0.0, 200.0)
AGES = (18.0, 90.0)
_STEPS = {"age": 1.0}
CELLS = ("a", "b", "c", "d")
SHARES = (0.6, 0.25, 0.1, 0.05)


@dataclass(frozen=True)
class Case:
    """One statistic: how to release it, its true value, and the error of the reference."""

    name: str
    release: Callable[[dict[str, Any], dict[str, Any]], list[Statistic]]
    truth: Callable[[dict[str, Any]], list[float]]
    reference: str
    width: Callable[[float], float]
    """Width of the reference interval at epsilon."""


def people(rng: np.random.Generator, n: int) -> dict[str, Any]:
    """Draw records: skewed incomes that depend on age, a category, labels, scores, a target."""
    age = rng.integers(18, 91, n).astype(float)
    income = np.clip(np.exp(3 + 0.008 * (age - 54) + 0.7 * rng.normal(size=n)), *BOUNDS)
    label = rng.random(n) < 0.3
    logit = -1 + 1.5 * label + 1.2 * rng.normal(size=n)
    x = rng.normal(size=n)
    target = np.clip(100 + 30 * x + 24 * rng.normal(size=n), *BOUNDS)
    return {
        "age": age,
        "income": income,
        "cell": rng.choice(CELLS, n, p=SHARES),
        "label": label.astype(int),
        "score": ndtr(logit / 1.7),
        "right": (rng.random(n) < 0.93).astype(int),
        "target": target,
        "predicted": 100 + 30 * x,
    }


def cases(n_population: int = 2_000_000) -> list[Case]:
    """All statistics, with true values from a large simulated population."""
    world = people(np.random.default_rng(1), n_population)
    income = (world["income"] - BOUNDS[0]) / (BOUNDS[1] - BOUNDS[0])
    width = BOUNDS[1] - BOUNDS[0]
    age = (world["age"] - AGES[0]) / (AGES[1] - AGES[0])
    squares = np.minimum(np.abs(world["target"] - world["predicted"]), width) ** 2 / width**2
    losses = -np.log(np.where(world["label"] == 1, world["score"], 1 - world["score"]))
    losses = np.minimum(losses, 5.0) / 5.0
    deviation = (income - income.mean()) ** 2
    product = (income - income.mean()) * (age - age.mean())
    found = [
        Case(
            "count",
            lambda t, terms: [summaries.count(t["income"], **terms)],
            lambda t: [float(len(t["income"]))],
            "exactly drawn discrete Laplace noise",
            _geometric_width,
        ),
        Case(
            "histogram, counts",
            lambda t, terms: list(summaries.histogram(t["cell"], categories=CELLS, **terms))[:4],
            lambda t: [float((t["cell"] == c).sum()) for c in CELLS],
            "exactly drawn discrete Laplace noise",
            _geometric_width,
        ),
        Case(
            "mean",
            lambda t, terms: [summaries.mean(t["income"], bounds=BOUNDS, **terms)],
            lambda t: [width * income.mean()],
            "sums of u and 1 - u",
            lambda e: width * _two_cell_width(income, e, (0, 1)),
        ),
        Case(
            "variance",
            lambda t, terms: [summaries.variance(t["income"], bounds=BOUNDS, **terms)],
            lambda t: [width**2 * income.var()],
            "sums of q and 1 - q, q = (u - known mean)^2 / maximum",
            lambda e: width**2 * _two_cell_width(deviation, e),
        ),
        Case(
            "covariance",
            lambda t, terms: _covariance(t, terms, variances=False),
            lambda t: [width * (AGES[1] - AGES[0]) * product.mean()],
            "sums of q and 1 - q, q = product of deviations from known means, scaled",
            lambda e: width * (AGES[1] - AGES[0]) * _two_cell_width(product, e),
        ),
        Case(
            "covariance matrix",
            lambda t, terms: _covariance(t, terms, variances=True)[:1],
            lambda t: [width * (AGES[1] - AGES[0]) * product.mean()],
            "as above at a third of epsilon, because two variances are released as well",
            lambda e: width * (AGES[1] - AGES[0]) * _two_cell_width(product, e / 3),
        ),
        Case(
            "accuracy",
            lambda t, terms: [summaries.accuracy(t["right"], np.ones_like(t["right"]), **terms)],
            lambda t: [0.93],
            "numbers of right and wrong",
            lambda e: _share_width(0.93, e),
        ),
        Case(
            "mean squared error",
            lambda t, terms: [
                summaries.mean_squared_error(
                    t["target"], t["predicted"], largest_error=width, **terms
                )
            ],
            lambda t: [width**2 * squares.mean()],
            "sums of u and 1 - u",
            lambda e: width**2 * _two_cell_width(squares, e, (0, 1)),
        ),
        Case(
            "log loss",
            lambda t, terms: [summaries.log_loss(t["label"], t["score"], **terms)],
            lambda t: [5 * losses.mean()],
            "sums of u and 1 - u",
            lambda e: 5 * _two_cell_width(losses, e, (0, 1)),
        ),
    ]
    return [*found, *_quantile_cases(world), *_share_cases(), _r2_case(world), *_auc_cases(world)]


def _covariance(t: dict[str, Any], terms: dict[str, Any], variances: bool) -> list[Statistic]:
    columns = {"age": t["age"], "income": t["income"]}
    bounds = {"age": AGES, "income": BOUNDS}
    found = summaries.covariance(columns, bounds=bounds, variances=variances, **terms)
    return list(found)


def _quantile_cases(world: dict[str, Any]) -> Iterator[Case]:
    for column, bounds in (("income", BOUNDS), ("age", AGES)):
        for p in (0.25, 0.5, 0.9):
            yield Case(
                f"quantile {p:g} of {column}",
                lambda t, terms, c=column, b=bounds, p=p: list(
                    summaries.quantiles(t[c], [p], bounds=b, step=_STEPS.get(c), **terms)
                ),
                lambda t, c=column, p=p: [float(np.quantile(world[c], p, method="inverted_cdf"))],
                "shortest of trees at noise 0"
                + (", one leaf for each age," if column in _STEPS else "")
                + " and two draws of the exponential mechanism",
                lambda e, c=column, b=bounds, p=p: _quantile_width(c, b, p, e),
            )


def _share_cases() -> Iterator[Case]:
    yield Case(
        "histogram, shares",
        lambda t, terms: list(
            summaries.histogram(t["cell"], categories=CELLS, about="population", **terms)
        )[:4],
        lambda t: list(SHARES),
        "average over cells: numbers in and not in the cell, for one cell only",
        lambda e: float(np.median([_share_width(p, e) for p in SHARES])),
    )
    yield Case(
        "contingency table, shares",
        lambda t, terms: list(
            summaries.contingency_table(
                t["cell"],
                t["label"],
                categories=(CELLS, (0, 1)),
                about="population",
                **terms,
            )
        )[:8],
        lambda t: [p * q for p in SHARES for q in (0.7, 0.3)],
        "average over cells: numbers in and not in the cell, for one cell only",
        lambda e: float(np.median([_share_width(p * q, e) for p in SHARES for q in (0.7, 0.3)])),
    )


def _r2_case(world: dict[str, Any]) -> Case:
    width = BOUNDS[1] - BOUNDS[0]
    y = (world["target"] - BOUNDS[0]) / width
    z = np.minimum(np.abs(world["target"] - world["predicted"]) / width, 1) ** 2
    ratio = z.mean() / y.var()
    psi = ratio * (y - y.mean()) ** 2 - z

    def reference(e: float) -> float:
        # psi is in [-1, 1/4], so one record moves its sum by at most 1.
        return _error_width([1 / (0.7 * e)], psi.var() * N_RECORDS) / (N_RECORDS * y.var())

    return Case(
        "R2",
        lambda t, terms: [summaries.r2(t["target"], t["predicted"], bounds=BOUNDS, **terms)],
        lambda t: [1 - ratio],
        "sum of (1 - R2)(y - mean)^2 - z at 70 % of epsilon, after mean, variance and R2",
        reference,
    )


def _auc_cases(world: dict[str, Any]) -> Iterator[Case]:
    positives = world["label"] == 1

    def binned(e: float) -> np.ndarray:
        bins = int(np.clip(np.rint(32 * np.sqrt(e)), 12, 32))
        return np.minimum((world["score"] * bins).astype(int), bins - 1)

    def area_and_influence(e: float) -> tuple[float, np.ndarray, np.ndarray]:
        ranks = rankdata(binned(e))
        n_pos, n_neg = positives.sum(), (~positives).sum()
        area = (ranks[positives].sum() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg)
        below = (ranks[positives] - rankdata(binned(e)[positives])) / n_neg
        above = 1 - (ranks[~positives] - rankdata(binned(e)[~positives])) / n_pos
        return float(area), below - area, above - area

    def reference(e: float) -> float:
        area, pos, neg = area_and_influence(e)
        share = positives.mean()
        variance = pos.var() / share + neg.var() / (1 - share)
        # One record moves the one-step sum by at most max(area, 1 - area) / (share of its class).
        largest = max(area, 1 - area) / min(share, 1 - share)
        return _error_width([largest / (0.6 * e)], variance * N_RECORDS) / N_RECORDS

    yield Case(
        "AUC",
        lambda t, terms: [summaries.auc(t["label"], t["score"], **terms)],
        lambda t: [area_and_influence(t["epsilon"])[0]],
        "one-step sum at 60 % of epsilon, after the histograms of both classes",
        reference,
    )


def _geometric_width(epsilon: float) -> float:
    """Width of the shortest interval of whole numbers around a count with discrete noise."""
    a = math.exp(-epsilon)
    return 2.0 * next(k for k in range(10**6) if 1 - 2 * a ** (k + 1) / (1 + a) >= 0.95)


def _two_cell_width(
    values: np.ndarray, epsilon: float, bounds: tuple[float, float] | None = None
) -> float:
    """Width for the mean of `values`, from noisy sums of q and 1 - q, q their place in `bounds`.

    Where it is shorter: from the sum of values at a share of epsilon and the count at the rest.
    Without `bounds`, the range of the values in the population is used.
    """
    low, high = bounds or (values.min(), values.max())
    m = (values.mean() - low) / (high - low)
    variance = values.var() / (high - low) ** 2 * N_RECORDS
    best = _error_width([(1 - m) / epsilon, m / epsilon], variance)
    for share in (0.5, 0.7, 0.9):
        split = [1 / (share * epsilon), m / ((1 - share) * epsilon)]
        best = min(best, _error_width(split, variance))
    return (high - low) * best / N_RECORDS


def _share_width(p: float, epsilon: float) -> float:
    noise = [(1 - p) / epsilon, p / epsilon]
    return _error_width(noise, p * (1 - p) * N_RECORDS) / N_RECORDS


def _error_width(scales: list[float], variance: float, draws: int = 400_000) -> float:
    """Twice the 95 % quantile of |sum of Laplace variables + normal variable|, by simulation."""
    rng = np.random.default_rng(0)
    error = rng.normal(0, math.sqrt(variance), draws)
    for scale in scales:
        error += rng.laplace(0, scale, draws)
    return 2 * float(np.quantile(np.abs(error), 0.95))


def _quantile_width(column: str, bounds: tuple[float, float], p: float, e: float) -> float:
    """Width of the shortest of several intervals that hold for every distribution.

    From trees of counts with 256 to 65,536 cells, or one for each age: the median over 51 tables if
    the noise happens to be 0. From the exponential mechanism over 1,024 cells, or over the ages:
    two draws at half of epsilon each, with the number of values below as score, so far out that the
    union bound over all cells gives 97.5 % for each.
    """
    tables = [people(np.random.default_rng([2, k]), N_RECORDS)[column] for k in range(51)]
    medians, range_ = [], Range(*bounds)
    n_values = grid_size(range_, _STEPS.get(column))
    for n_cells in (256, 1024, 4096, 65_536):
        tree = choose_tree(Terms.check({"epsilon": e}), n_cells, n_values=n_values)
        edges = np.linspace(*bounds, tree.n_leaves + 1)
        if n_values:
            edges = np.append(np.arange(tree.n_leaves), np.inf) + bounds[0] - 0.5
        widths = []
        variances = _node_variances(tree.depth, tree.branching, 2 * (tree.depth / e) ** 2)
        for values in tables:
            exact = np.histogram(values, edges)[0].astype(float)
            # Counts whose Laplace noise happens to be 0: how long is an interval on average?
            counts = ConsistentCounts(tree, exact, tuple(variances), is_laplace=True)
            found = quantile_interval(counts, p, range_, "population", 0.95)
            widths.append(found.upper - found.lower)
        medians.append(float(np.median(widths)))
    scale = 2 * max(p, 1 - p) / (e / 2)  # one record changes the score by at most max(p, 1 - p)
    margin = scale * math.log((n_values or 1024) / 0.0125)
    margin += -float(ndtri(0.0125)) * math.sqrt(N_RECORDS * p * (1 - p))
    share = margin / N_RECORDS
    ends = np.quantile(np.concatenate(tables), [max(p - share, 0.0), min(p + share, 1.0)])
    return min(*medians, float(ends[1] - ends[0]))


def simulate(case: Case, epsilon: float, repeats: int, *, seed: int = 0) -> tuple[float, float]:
    """Return the share of intervals that cover, and the median width."""
    covered, widths = [], []
    for repeat in range(repeats):
        private = people(np.random.default_rng([seed, repeat]), N_RECORDS)
        private["epsilon"] = epsilon
        noise = np.random.default_rng([seed, repeat, 1])
        found = case.release(private, {"epsilon": epsilon, "rng": noise})
        if repeat == 0 or case.name in ("count", "histogram, counts"):
            truth = case.truth(private)
        covered += [s.lower <= x <= s.upper for s, x in zip(found, truth, strict=True)]
        widths.append(np.median([s.upper - s.lower for s in found]))
    return float(np.mean(covered)), float(np.median(widths))


def measure(case: Case, epsilon: float, repeats: int) -> tuple[object, ...]:
    """Return one row of the result."""
    coverage, width = simulate(case, epsilon, repeats)
    shortest = case.width(epsilon)
    ratio = width / shortest if shortest > 0 else (1.0 if width == 0 else math.inf)
    numbers = (f"{coverage:.1%}", f"{width:.4g}", f"{shortest:.4g}", f"{ratio:.2f}")
    return (case.name, epsilon, *numbers, case.reference)


def report(rows: list[tuple[object, ...]], repeats: int) -> None:
    """Write the result page."""
    error = 100 * math.sqrt(0.95 * 0.05 / repeats)
    write(
        "summaries",
        "Summaries: coverage and width of 95 % intervals",
        ("numpy", "scipy"),
        (__doc__ or "").split("\n\n", 2)[2].replace("\n", " ").strip(),
        f"{repeats:,} tables of {N_RECORDS:,} records for each row. The standard error of a "
        f"coverage of 95 % is {error:.1f} percentage points.",
        table(HEADER, rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=1000)
    repeats = parser.parse_args().repeats
    rows = []
    for case in cases():
        for epsilon in EPSILONS:
            rows.append(measure(case, epsilon, repeats))
            print(*rows[-1], sep=" | ", flush=True)
    report(rows, repeats)


if __name__ == "__main__":
    main()

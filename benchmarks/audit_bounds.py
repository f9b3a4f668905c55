"""What each lower bound reaches on an ideal attack, and how often it passes the truth.

    python benchmarks/audit_bounds.py

Gaussian mechanism, delta 1e-5, confidence 95 %; writes results/audit_bounds.md. The last tables
show a method that is *not* valid (choosing the number of guesses after seeing the scores), and what
no valid bound can reach if it assumes fair coins alone (`ceiling`).
"""

import time

import numpy as np
from _gaussian_bounds import gaussian_fit, gaussian_threshold_test
from _results import table, write
from scipy.special import ndtr, ndtri

from tacit import auditing
from tacit.auditing.one_run import (
    _cut,
    gaussian_epsilon_below,
    gaussian_inverse,
    gaussian_mu,
    largest,
    rejects_tradeoff,
    right_guesses,
)

DELTA, SIGMAS = 1e-5, (0.5, 1.0, 2.0, 4.0)
MANY, FEW = 100_000, 1_000  # canaries of an audit, and of a repetition for coverage
RUNS, REPETITIONS = 20, 1_000
PUBLISHED = (8.16, 3.61, 1.59, 0.82)  # Mahloujifar et al. 2024, for their f-DP bound
MIXTURES, CELLS, DRAWS = (0.11, 0.13, 0.16, 0.2, 0.25, 0.3, 0.4), 400, 4_000  # of `ceiling`


def planned(bound):
    return lambda s, i, bill: bound(s, i, delta=DELTA, expected_epsilon=bill)


BOUNDS = {
    "one_run, planned guesses": planned(auditing.one_run),
    "one_run, Bonferroni": lambda s, i, _: auditing.one_run(s, i, delta=DELTA),
    "one_run, split": lambda s, i, _: auditing.one_run(s, i, delta=DELTA, guesses="split"),
    "one_run_gaussian, planned": planned(auditing.one_run_gaussian),
    "one_run_gaussian, Bonferroni": lambda s, i, _: auditing.one_run_gaussian(s, i, delta=DELTA),
    "threshold_test": lambda s, i, _: auditing.threshold_test(s, i, delta=DELTA),
    "gaussian_threshold_test": lambda s, i, _: gaussian_threshold_test(s, i, delta=DELTA),
    "gaussian_fit": lambda s, i, _: gaussian_fit(s, i, delta=DELTA),
}
QUICK = {name for name in BOUNDS if not name.endswith(("Bonferroni", "split"))}


def main() -> None:
    reached, coverage = [], []
    for name, bound in BOUNDS.items():
        runs = REPETITIONS if name in QUICK else RUNS
        start = time.process_time()
        found = [lowers(bound, sigma, MANY, runs) for sigma in SIGMAS]
        seconds = (time.process_time() - start) / (runs * len(SIGMAS))
        means = [f"{np.mean(values):.2f}" for values in found]
        reached.append((name, *means, f"{runs:,}", f"{1000 * seconds:.0f} ms"))
        if name in QUICK:
            coverage.append(failures(name, MANY, found))
        coverage.append(failures(name, FEW, [lowers(bound, s, FEW, REPETITIONS) for s in SIGMAS]))
    header = ["bound", *(f"noise {sigma:g}" for sigma in SIGMAS)]
    truths = ("true epsilon", *(f"{truth(sigma):.2f}" for sigma in SIGMAS), "", "")
    write(
        "audit_bounds",
        "Lower bounds on epsilon from an ideal attack",
        ["tacit", "numpy", "scipy"],
        f"Mean over audits with {MANY:,} canaries, and CPU time of one (drawing included):",
        table([*header, "audits", "time"], [truths, *reached]),
        f"Share of {REPETITIONS:,} audits whose bound passed the truth (allowed: 5 %; gaussian_fit "
        "is exact, so its share is 5 % up to the sampling error of 0.7 %):",
        table(["bound", "canaries", *header[1:]], sorted(coverage, key=lambda row: row[1])),
        f"Not valid: the best of 60 numbers of guesses, chosen after the fact ({MANY:,} canaries, "
        f"{RUNS // 2} audits; mean, and how many passed the truth):",
        table(header, [swept()]),
        f"No bound that assumes fair coins alone can be right in 95 % of audits and reach more "
        f"than this in half of them ({MANY:,} canaries, ideal attack); below, in how many audits "
        "at most it can reach the figures published for the f-DP bound:",
        table(header, [ceiling(), reachable()]),
        "The same f-DP bound by number of canaries (best number of guesses, as many right as "
        "expected): the published figures ask for 1,000,000 and more.",
        table(header, by_canaries()),
    )


def failures(name: str, n: int, found: list[np.ndarray]) -> tuple[str, ...]:
    """Return a row of the table of coverage."""
    shares = [np.mean(values > truth(s)) for s, values in zip(SIGMAS, found, strict=True)]
    return (name, f"{n:,}", *(f"{share:.1%}" for share in shares))


def truth(sigma: float) -> float:
    return gaussian_epsilon_below(1 / sigma, DELTA)


def draw(sigma, n, rng):
    inside = auditing.flip_coins(n, rng)
    return inside + rng.normal(0, sigma, n), inside


def lowers(bound, sigma, n, repetitions) -> np.ndarray:
    rng = np.random.default_rng(0)
    bill = truth(sigma)
    return np.array([bound(*draw(sigma, n, rng), bill).epsilon_lower for _ in range(repetitions)])


def swept() -> tuple[str, ...]:
    cells = []
    for sigma in SIGMAS:
        rng, found = np.random.default_rng(1), []
        for _ in range(RUNS // 2):
            scores, inside = draw(sigma, MANY, rng)
            best = 0.01
            for r in np.unique(np.geomspace(3, 20_000, 60).astype(int)):
                v = right_guesses(scores, inside, int(r))
                best = largest(
                    lambda mu, r=r, v=v: rejects_tradeoff(
                        gaussian_inverse(mu), MANY, int(r), v, 0.05
                    ),
                    at_least=best,
                )
            found.append(gaussian_epsilon_below(best, DELTA))
        above = sum(lower > truth(sigma) for lower in found)
        cells.append(f"{np.mean(found):.2f} ({above} of {len(found)})")
    return ("one_run_gaussian, swept", *cells)


def by_canaries() -> list[tuple[str, ...]]:
    """Return the published f-DP bounds for an ideal attack that is right as often as expected."""
    rows = []
    for n in (100_000, 1_000_000, 10_000_000):
        found = []
        for sigma in SIGMAS:
            best = 0.0
            for r in np.unique(np.geomspace(64, 50_000, 24).astype(int)).tolist():
                v = int(n * ndtr(1 / (2 * sigma) - _cut(1 / sigma, r / n)))

                def rejects(mu, n=n, r=r, v=v):
                    return rejects_tradeoff(gaussian_inverse(mu), n, r, v, 0.05)

                best = largest(rejects, at_least=best)
            found.append(f"{gaussian_epsilon_below(best, DELTA):.2f}")
        rows.append((f"one_run_gaussian, {n:,} canaries", *found))
    return rows


def ceiling() -> tuple[str, ...]:
    """Return the epsilon that a bound from coins alone reaches in at most half of the audits.

    Why there is one: a mechanism of smaller mu may, with probability p, treat all canaries at once
    by a louder mechanism, and reveal nothing otherwise. It is mu-GDP if every error rate x of the
    loud part has power at most (1 / p) Phi(Phi^-1(p x) + mu). A bound that is wrong in at most 5 %
    of audits passes mu in at most 0.05 / p of the loud ones, so in at most 0.05 / p + TV of the
    ideal ones, TV the distance between the two laws of what the auditor sees.
    """
    cells = []
    for sigma in SIGMAS:
        low, high = 0.5, 1.0  # of the true mu
        while high - low > 0.002:
            middle = (low + high) / 2
            low, high = (low, middle) if share_above(sigma, middle) < 0.5 else (middle, high)
        cells.append(f"{gaussian_epsilon_below(high / sigma, DELTA):.2f}")
    return ("most that coins allow", *cells)


def reachable() -> tuple[str, ...]:
    cells = []
    for sigma, epsilon in zip(SIGMAS, PUBLISHED, strict=True):
        fraction = gaussian_mu(epsilon, DELTA) * sigma
        cells.append(f"{epsilon:.2f} in {100 * share_above(sigma, fraction):.0f} %")
    return ("published, reached at most", *cells)


def share_above(sigma: float, fraction: float) -> float:
    """Return the largest share of audits in which a valid bound exceeds `fraction` of true mu."""
    return min(
        1.0, *(0.05 / p + distance(1 / sigma, fraction / sigma, p) for p in MIXTURES)
    )  # each mixture is an upper bound, so the least of them is


def distance(true_mu: float, mu: float, p: float) -> float:
    """Return the total variation between the guess counts of the ideal attack and of a mixture.

    The loud part is wrong as often as the ideal attack, or as often as its limit asks if that is
    more: both are convex in the number of guesses, so the ranking stays one by likelihood.
    """
    t = np.linspace(9.0, 0.0, CELLS)
    made = ndtr(true_mu / 2 - t) + ndtr(-true_mu / 2 - t)  # guesses on a canary, surest first
    ideal = ndtr(-true_mu / 2 - t)
    z = np.linspace(-12.0, ndtri(p) - 1e-9, 20_001)
    wrong, right = ndtr(z) / p, np.minimum(ndtr(z + mu) / p, 1.0)
    loud = np.maximum(ideal, np.interp(made, wrong + right, wrong))
    all_, a, b = (np.maximum(np.diff(x, prepend=0.0), 1e-300) for x in (made, ideal, loud))
    a, b = np.minimum(a, all_), np.minimum(b, all_)
    rng = np.random.default_rng(0)
    wrong_counts = rng.poisson(MANY * a, (DRAWS, CELLS))
    right_counts = rng.poisson(MANY * (all_ - a), (DRAWS, CELLS))
    safe = [np.maximum(all_ - x, 1e-300) for x in (b, a)]
    log_ratio = wrong_counts @ np.log(b / a) + right_counts @ np.log(safe[0] / safe[1])
    return float(np.maximum(0.0, -np.expm1(log_ratio)).mean())


if __name__ == "__main__":
    main()

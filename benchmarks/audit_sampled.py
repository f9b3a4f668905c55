"""Lower bounds for sampled Gaussian releases, and how often they pass the truth.

    python benchmarks/audit_sampled.py [--audits 1000] [--processes 16]

Delta 1e-5, confidence 95 %, one release, an ideal attack on canaries that are in by fair coins.
References are coordinates of noise that belong to no canary. Writes results/audit_sampled.md.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np
from _results import table, write

import tacit
from tacit.auditing import flip_coins, noise_bound
from tacit.events import Gaussian, PoissonSampled

DELTA = 1e-5
CASES = ((1.0, 0.5, 1_000), (2.0, 0.2, 10_000))  # mu, rate, canaries
REFERENCES = (0, 10)  # for each canary


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--audits", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    rows = []
    with ProcessPoolExecutor(options.processes) as pool:
        for mu, rate, n in CASES:
            price = tacit.epsilon(PoissonSampled(rate, Gaussian(1 / mu)), delta=DELTA)
            for references in REFERENCES:
                one = partial(bound, mu, rate, n, references)
                found = np.array(list(pool.map(one, range(options.audits), chunksize=10)))
                row = (mu, rate, f"{n:,}", references, f"{price:.2f}", *cells(found, price))
                rows.append(row)
                print(*row, flush=True)
    header = ["mu", "rate", "canaries", "references", "true", "median", "mean", "10 %", "above"]
    write(
        "audit_sampled",
        "Lower bounds for sampled Gaussian releases",
        ["tacit", "numpy", "scipy"],
        f"`noise_bound` at delta {DELTA:g} and 95 %, {options.audits:,} audits of each case: "
        "median, mean and lowest decile of the bound, and the share of audits in which it is above "
        "the true epsilon (allowed: 5 %). References are counted for each canary.",
        table(header, rows),
    )


def bound(mu: float, rate: float, n: int, references: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    inside = flip_coins(n, rng)
    seen = inside * (rng.random(n) < rate) + rng.normal(0, 1 / mu, n)
    event, never_in = PoissonSampled(rate, Gaussian(1 / mu)), rng.normal(0, 1 / mu, references * n)
    return noise_bound(seen, inside, event, delta=DELTA, reference=never_in).epsilon_lower


def cells(found: np.ndarray, price: float) -> tuple[str, ...]:
    low, median = np.quantile(found, [0.1, 0.5])
    numbers = (median, found.mean(), low)
    return (*(f"{number:.2f}" for number in numbers), f"{np.mean(found > price):.1%}")


if __name__ == "__main__":
    main()

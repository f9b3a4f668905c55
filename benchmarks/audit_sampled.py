"""Lower bounds for sampled Gaussian releases, and how often they pass the truth.

    python benchmarks/audit_sampled.py [--audits 1000] [--processes 16]

Delta 1e-5, confidence 95 %, an ideal attack on canaries that are in by fair coins.
References are coordinates of noise that belong to no canary. Writes results/audit_sampled.md.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np
from _results import table, write

import tacit
from tacit.auditing import flip_coins, noise_bound
from tacit.auditing.canaries import log_ratio
from tacit.events import Event, Gaussian, PoissonSampled, Repeated

DELTA = 1e-5
CASES = (  # mu, rate, steps, canaries
    (1.0, 0.5, 1, 1_000),
    (2.0, 0.2, 1, 10_000),
    (0.7, 0.12, 200, 1_000),
)
REFERENCES = (0, 10)  # for each canary


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--audits", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    rows = []
    with ProcessPoolExecutor(options.processes) as pool:
        for mu, rate, steps, n in CASES:
            price = tacit.epsilon(event_of(mu, rate, steps), delta=DELTA)
            for references in REFERENCES:
                one = partial(bound, mu, rate, steps, n, references)
                found = np.array(list(pool.map(one, range(options.audits), chunksize=10)))
                row = (mu, rate, steps, f"{n:,}", references, f"{price:.2f}", *cells(found, price))
                rows.append(row)
                print(*row, flush=True)
    header = [
        "mu",
        "rate",
        "steps",
        "canaries",
        "references",
        "true",
        "median",
        "mean",
        "10 %",
        "above",
    ]
    write(
        "audit_sampled",
        "Lower bounds for sampled Gaussian releases",
        ["tacit", "numpy", "scipy"],
        f"`noise_bound` at delta {DELTA:g} and 95 %, {options.audits:,} audits of each case: "
        "median, mean and lowest decile of the bound, and the share of audits in which it is above "
        "the true epsilon (allowed: 5 %). References are counted for each canary.",
        table(header, rows),
    )


def event_of(mu: float, rate: float, steps: int) -> Event:
    step = PoissonSampled(rate, Gaussian(1 / mu))
    return step if steps == 1 else Repeated(step, steps)


def bound(mu: float, rate: float, steps: int, n: int, references: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    inside = flip_coins(n, rng)
    is_in = np.concatenate([inside, np.zeros(references * n, bool)])
    scores = np.zeros(len(is_in))
    for _ in range(steps):
        seen = is_in * (rng.random(len(is_in)) < rate) + rng.normal(0, 1 / mu, len(is_in))
        scores += log_ratio(seen, rate=rate, noise_multiplier=1 / mu)
    found = noise_bound(
        scores[:n], inside, event_of(mu, rate, steps), delta=DELTA, reference=scores[n:]
    )
    return found.epsilon_lower


def cells(found: np.ndarray, price: float) -> tuple[str, ...]:
    low, median = np.quantile(found, [0.1, 0.5])
    numbers = (median, found.mean(), low)
    return (*(f"{number:.2f}" for number in numbers), f"{np.mean(found > price):.1%}")


if __name__ == "__main__":
    main()

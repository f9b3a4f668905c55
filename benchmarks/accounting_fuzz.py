"""Random settings of DP-SGD: time and width of every bracket, and a race against dp-accounting.

    python benchmarks/accounting_fuzz.py --settings 5000
    python benchmarks/accounting_fuzz.py --settings 5000 --race 20     (needs the other libraries)

Settings are drawn log-uniformly: rates 1e-7 to 1, noise multipliers 0.3 to 20, 1 to 1e9 steps,
delta 1e-15 to 0.5. Settings whose epsilon is above `--most` (50) are drawn again. A width is
(upper - lower) / upper. Times are process CPU seconds of one query; every query is another one, so
nothing is cached, except that one query before the first loads what is imported on use. In the
race, both libraries price each setting in turn, in one process.
"""

import argparse
import math
import signal
import statistics
import time
import warnings
from typing import NamedTuple

import numpy as np
from _results import table, write

import tacit
from tacit import events as ev


class Draw(NamedTuple):
    """One random setting."""

    rate: float
    noise: float
    steps: int
    delta: float

    @property
    def event(self) -> ev.Event:
        return ev.Repeated(ev.PoissonSampled(self.rate, ev.Gaussian(self.noise)), self.steps)


def draw(rng: np.random.Generator) -> Draw:
    """Return a setting drawn log-uniformly."""

    def between(low: float, high: float) -> float:
        return float(10 ** rng.uniform(math.log10(low), math.log10(high)))

    return Draw(between(1e-7, 1), between(0.3, 20), int(between(1, 1e9)), between(1e-15, 0.5))


def measure(settings: int, most: float, seed: int) -> list[tuple[Draw, float, float, float]]:
    """Return (setting, epsilon, width, seconds) of random settings with epsilon <= `most`."""
    rng = np.random.default_rng(seed)
    found = []
    tacit.bracket(Draw(1e-3, 0.9, 100, 1e-6).event, delta=1e-6)
    while len(found) < settings:
        one = draw(rng)
        start = time.process_time()
        bracket = tacit.bracket(one.event, delta=one.delta)
        seconds = time.process_time() - start
        if bracket.upper <= most:
            width = bracket.width / bracket.upper if bracket.upper > 0 else 0.0
            found.append((one, bracket.upper, width, seconds))
    return found


def race(settings: list[Draw], limit: float) -> list[list[str]]:
    """Price each setting by both libraries, one after the other, and return a row for each.

    The peer gets `limit` seconds; where it needs more, the ratio counts the time it had. The timer
    is one of the clock: one of CPU time would make the kernel read CPU times at its ticks only.
    """
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    rows = []
    for one in settings:
        step = dp_event.PoissonSampledDpEvent(one.rate, dp_event.GaussianDpEvent(one.noise))
        start = time.process_time()
        ours = tacit.epsilon(one.event, delta=one.delta)
        middle = time.process_time()
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            accountant = PLDAccountant().compose(dp_event.SelfComposedDpEvent(step, one.steps))
            theirs = accountant.get_epsilon(one.delta)
            mark = ""
        except (TimeoutError, MemoryError) as failure:
            theirs, mark = math.nan, f" ({type(failure).__name__})"
        signal.setitimer(signal.ITIMER_REAL, 0)
        end = time.process_time()
        lower = tacit.bracket(one.event, delta=one.delta).lower
        mark = " (below our certified lower end)" if theirs < lower * (1 - 1e-9) else mark
        ratio = (end - middle) / max(middle - start, 1e-6)
        text = f"{one.rate:.3g}, {one.noise:.3g}, {one.steps}, {one.delta:.1g}"
        times = [f"{1e3 * (middle - start):.2f}", f"{1e3 * (end - middle):.0f}"]
        rows.append([text, f"{ours:.6g}", f"{theirs:.6g}{mark}", *times, f"{ratio:.0f}"])
    return rows


def raced(settings: list[Draw], limit: float) -> list[str]:
    """Return the blocks of a page about a race."""
    rows = race(settings, limit)
    middle = statistics.median(float(row[-1]) for row in rows)
    head = ["rate, noise, steps, delta", "tacit", "dp-accounting PLD", "ms", "ms", "ratio"]
    return [table(head, rows), f"Median ratio {middle:.0f}."]


def summarized(found: list[tuple[Draw, float, float, float]]) -> list[str]:
    """Return the blocks of a page about what `measure` found."""
    widths, times = np.array([f[2] for f in found]), np.array([f[3] for f in found])
    worst = sorted(found, key=lambda f: -f[3])[:5] + sorted(found, key=lambda f: -f[2])[:5]
    summary = [
        ["settings", str(len(found))],
        ["wider than 1e-3", f"{(widths > 1e-3).mean():.2%}"],
        ["median, worst width", f"{np.median(widths):.1e}, {widths.max():.1e}"],
        [
            "median, 99 %, worst time",
            " ".join(f"{1e3 * t:.1f} ms" for t in np.quantile(times, [0.5, 0.99, 1])),
        ],
        ["slower than 0.2 s", f"{(times > 0.2).mean():.2%}"],
    ]
    rows = [
        [str(f[0].event), f"{f[0].delta:.1e}", f"{f[1]:.5g}", f"{f[2]:.0e}", f"{1e3 * f[3]:.1f}"]
        for f in worst
    ]
    return [
        "## Brackets",
        table(["", ""], summary),
        table(["slowest and widest", "delta", "epsilon", "width", "ms"], rows),
    ]


def main() -> None:
    """Run the fuzz and, with --race, the race; write results/accounting_fuzz.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=int, default=5000)
    parser.add_argument("--race", type=int, default=0)
    parser.add_argument("--most", type=float, default=50.0)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of the peer")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found = measure(given.settings, given.most, given.seed)
    blocks = summarized(found)
    if given.race:
        rng = np.random.default_rng(given.seed + 1)
        settings = [found[i][0] for i in rng.permutation(len(found))[: given.race]]
        blocks += ["## Race at random settings", *raced(settings, given.limit)]
        from accounting import GRID  # needs the other peers

        own = [Draw(one.rate, one.noise, one.steps, one.delta) for one in GRID]
        blocks += ["## Race at the settings of the README", *raced(own, given.limit)]
    for block in blocks:
        print(block, "\n")
    if given.settings >= 1000:
        write("accounting_fuzz", "Random settings", ("tacit", "numpy", "scipy"), *blocks)


if __name__ == "__main__":
    main()

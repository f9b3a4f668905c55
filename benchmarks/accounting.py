"""tacit's tight accountant against dp-accounting, prv-accountant and Opacus, in one process.

    pip install -e . -r benchmarks/requirements-accounting.txt
    python benchmarks/accounting.py

Times are medians of process CPU seconds. A peer's value is marked `<` when what it states as an
upper bound lies below our certified lower bound, and `!` when it failed (the reason is under the
table). Peers run with their defaults, except that prv-accountant and Opacus PRV get eps_error 0.01
(their 0.1 would not resolve most settings) and calibration of dp-accounting gets the starting
bracket that its documentation uses.
"""

import argparse
import contextlib
import math
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import dp_accounting
import numpy as np
import prv_accountant
from _results import cpu_seconds, table, write
from dp_accounting import pld as dpa_pld
from dp_accounting import rdp as dpa_rdp
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.utils import get_noise_multiplier
from prv_accountant.dpsgd import DPSGDAccountant

import tacit
from tacit import events as ev

PACKAGES = ("tacit", "dp-accounting", "prv-accountant", "opacus", "numpy", "scipy")


class Setting(NamedTuple):
    """A run of DP-SGD."""

    name: str
    rate: float
    noise: float
    steps: int
    delta: float

    @property
    def event(self) -> ev.Event:
        return ev.Repeated(ev.PoissonSampled(self.rate, ev.Gaussian(self.noise)), self.steps)


GRID = [
    Setting("Abadi 2016", 0.01, 4.0, 10_000, 1e-5),
    Setting("MNIST tutorial, 60 epochs", 256 / 60_000, 1.1, 14_062, 1e-5),
    Setting("MNIST tutorial, 15 epochs", 256 / 60_000, 1.3, 3_515, 1e-5),
    Setting("MNIST tutorial, 45 epochs", 256 / 60_000, 0.7, 10_546, 1e-5),
    Setting("CIFAR", 0.01024, 1.0, 9_765, 1e-5),
    Setting("CIFAR, batch 4096", 0.08192, 3.0, 2_441, 1e-5),
    Setting("Adult", 256 / 29_305, 0.55, 2_286, 1e-5),
    Setting("IMDB", 0.02048, 0.56, 439, 1e-5),
    Setting("language model, fine-tuned", 0.001, 0.7, 10_000, 1e-6),
    Setting("language model, long", 0.0001, 0.6, 100_000, 1e-8),
    Setting("language model, pretrained", 0.0001, 1.0, 100_000, 1e-9),
    Setting("half of the data", 0.5, 20.0, 1_000, 1e-6),
    Setting("one step", 0.1, 1.0, 1, 1e-5),
    Setting("one Gaussian", 1.0, 1.0, 1, 1e-5),
    Setting("1,000 Gaussians", 1.0, 20.0, 1_000, 1e-6),
    Setting("middle a", 0.02, 0.8, 5_000, 1e-6),
    Setting("middle b", 0.05, 1.5, 2_000, 1e-8),
    Setting("middle c", 0.2, 2.0, 50, 1e-3),
    Setting("middle d", 0.25, 5.0, 1_000, 1e-10),
    Setting("a million steps", 0.001, 2.0, 1_000_000, 1e-6),
    Setting("small noise, short", 0.001, 0.4, 1_000, 1e-5),
    Setting("ten steps", 0.01, 0.5, 10, 1e-6),
    Setting("rate 0.9", 0.9, 3.0, 300, 1e-5),
    Setting("large epsilon", 0.1, 0.8, 1_000, 1e-5),
    Setting("Gaussian limit", 0.01, 20.0, 100_000, 1e-7),
]

# (rate, steps, delta, epsilon wanted)
TARGETS = [
    (256 / 60_000, 14_062, 1e-5, 3.0),
    (256 / 60_000, 14_062, 1e-5, 1.0),
    (0.01, 10_000, 1e-5, 1.0),
    (0.08192, 2_441, 1e-5, 8.0),
    (0.001, 10_000, 1e-6, 2.0),
    (0.0001, 100_000, 1e-8, 0.5),
    (0.1, 1_000, 1e-5, 50.0),
    (0.02, 20, 1e-6, 1.0),
]


def dpa_event(setting: Setting) -> dp_accounting.DpEvent:
    gaussian = dp_accounting.GaussianDpEvent(setting.noise)
    step = dp_accounting.PoissonSampledDpEvent(setting.rate, gaussian)
    return dp_accounting.SelfComposedDpEvent(step, setting.steps)


def dpa(accountant: Callable[[], dp_accounting.PrivacyAccountant], setting: Setting) -> float:
    return accountant().compose(dpa_event(setting)).get_epsilon(setting.delta)


def opacus_rdp(setting: Setting) -> float:
    accountant = RDPAccountant()
    accountant.history = [(setting.noise, setting.rate, setting.steps)]
    return accountant.get_epsilon(setting.delta)


def opacus_prv(setting: Setting) -> float:
    accountant = PRVAccountant()
    accountant.history = [(setting.noise, setting.rate, setting.steps)]
    return accountant.get_epsilon(setting.delta, eps_error=0.01)


def prv(setting: Setting) -> float:
    accountant = DPSGDAccountant(
        noise_multiplier=setting.noise,
        sampling_probability=setting.rate,
        max_steps=setting.steps,
        eps_error=0.01,
        delta_error=setting.delta / 1000,
    )
    return accountant.compute_epsilon(setting.delta, setting.steps)[2]


PEERS: dict[str, Callable[[Setting], float]] = {
    "dp-accounting PLD": lambda s: dpa(dpa_pld.PLDAccountant, s),
    "prv-accountant": prv,
    "Opacus PRV": opacus_prv,
    "Opacus RDP": opacus_rdp,
    "dp-accounting RDP": lambda s: dpa(dpa_rdp.RdpAccountant, s),
}


def main() -> None:
    """Run all parts and write results/accounting.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=120, help="CPU seconds a query")
    limit = parser.parse_args().limit
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    failures: list[str] = []
    blocks = [
        "## One epsilon",
        *epsilon_block(limit, failures),
        "## Calibration: the smallest noise within a budget",
        *calibration_block(limit, failures),
        "## 200 different phases of 25 steps",
        phases_block(limit, failures),
        "## Time does not grow with the number of steps",
        steps_block(),
        "## Failures of peers",
        "\n".join(f"- {line}" for line in failures) or "none",
    ]
    write("accounting", "Accounting, side by side", PACKAGES, *blocks)


def epsilon_block(limit: float, failures: list[str]) -> Iterator[str]:
    """Every setting by everybody, then medians and ratios."""
    rows, times = [], {name: [] for name in ("tacit", *PEERS)}
    wrong = dict.fromkeys(PEERS, 0)
    for setting in GRID:
        bracket = tacit.bracket(setting.event, delta=setting.delta)
        ours = cpu_seconds(lambda s=setting: tacit.epsilon(s.event, delta=s.delta), repeats=15)
        times["tacit"].append(ours)
        width = (bracket.upper - bracket.lower) / max(bracket.upper, 1e-300)
        row = [setting.name, f"{bracket.upper:.6f}", f"{width:.0e}", f"{1e3 * ours:.1f}"]
        for name, peer in PEERS.items():
            value, seconds, reason = attempt(peer, setting, limit)
            times[name].append(seconds)
            if reason:
                failures.append(f"{name}, {setting.name}: {reason}")
                row.append(f"! after {seconds:.0f} s")
                continue
            too_small = value < bracket.lower * (1 - 1e-9)
            wrong[name] += too_small
            mark = "<" if too_small else ""
            row.append(f"{mark}{value:.4f} ({1e3 * seconds:.0f})")
        rows.append(row)
    yield table(
        [
            "setting",
            "tacit, certified upper",
            "relative width",
            "ms",
            *(f"{n} (ms)" for n in PEERS),
        ],
        rows,
    )
    summary = []
    for name, spent in times.items():
        ratios = [theirs / ours for theirs, ours in zip(spent, times["tacit"], strict=True)]
        median = statistics.median(spent)
        summary.append(
            [
                name,
                f"{1e3 * median:.2f}",
                f"{statistics.median(ratios):.0f}x",
                f"{median / statistics.median(times['tacit']):.0f}x",
                wrong.get(name, 0),
            ]
        )
    yield table(
        ["", "median ms", "median ratio to tacit", "ratio of medians", "bounds too small"], summary
    )


def calibration_block(limit: float, failures: list[str]) -> Iterator[str]:
    """The noise each library finds, what it really costs, and how long the search took."""
    rows, ratios = [], []
    for rate, steps, delta, wanted in TARGETS:
        ours = partial(calibrate_tacit, (rate, steps, delta, wanted))
        noise = ours()
        seconds = cpu_seconds(ours)
        target = Setting(f"{rate:.4g}, {steps}, {delta:g}, {wanted:g}", rate, noise, steps, delta)
        row = [target.name, f"{noise:.6f}", f"{1e3 * seconds:.0f}"]
        for name, search in CALIBRATIONS.items():
            found, taken, reason = attempt(search, (rate, steps, delta, wanted), limit)
            if reason:
                failures.append(f"calibrating {name}, {target.name}: {reason}")
                row.append(f"! after {taken:.0f} s")
            else:
                row.append(f"{found:.4f} ({taken:.2f} s)")
            if name == "dp-accounting PLD":
                ratios.append(taken / seconds)
        rows.append(row)
    yield table(["rate, steps, delta, epsilon", "tacit", "ms", *CALIBRATIONS], rows)
    yield f"Median ratio of dp-accounting PLD's time to tacit's: {statistics.median(ratios):.0f}x."


def calibrate_tacit(target: tuple[float, int, float, float]) -> float:
    rate, steps, delta, wanted = target
    return tacit.calibrate(
        lambda noise: Setting("", rate, noise, steps, delta).event, epsilon=wanted, delta=delta
    )


def calibrate_dpa(target: tuple[float, int, float, float]) -> float:
    rate, steps, delta, wanted = target
    return dp_accounting.calibrate_dp_mechanism(
        dpa_pld.PLDAccountant,
        lambda noise: dpa_event(Setting("", rate, noise, steps, delta)),
        wanted,
        delta,
        bracket_interval=dp_accounting.LowerEndpointAndGuess(0.2, 1.0),
        tol=1e-4,
    )


def calibrate_opacus(accountant: str) -> Callable[[tuple[float, int, float, float]], float]:
    def search(target: tuple[float, int, float, float]) -> float:
        rate, steps, delta, wanted = target
        return get_noise_multiplier(
            target_epsilon=wanted,
            target_delta=delta,
            sample_rate=rate,
            steps=steps,
            accountant=accountant,
        )

    return search


CALIBRATIONS = {
    "dp-accounting PLD": calibrate_dpa,
    "Opacus PRV": calibrate_opacus("prv"),
    "Opacus RDP": calibrate_opacus("rdp"),
}


def phases_block(limit: float, failures: list[str]) -> str:
    """A schedule that changes noise and rate 200 times."""
    rng = np.random.default_rng(0)
    phases = [
        Setting("", float(q), float(s), 25, 1e-5)
        for q, s in zip(rng.uniform(0.005, 0.02, 200), rng.uniform(0.8, 1.5, 200), strict=True)
    ]
    event = ev.Sequence(tuple(phase.event for phase in phases))
    bracket = tacit.bracket(event, delta=1e-5)
    rows = [
        [
            "tacit",
            f"{bracket.lower:.6f} .. {bracket.upper:.6f}",
            f"{cpu_seconds(lambda: tacit.epsilon(event, delta=1e-5)):.3f}",
        ]
    ]

    def composed(accountant: Callable[[], dp_accounting.PrivacyAccountant]) -> Callable:
        def run(_: object) -> float:
            total = accountant()
            for phase in phases:
                total.compose(dpa_event(phase))
            return total.get_epsilon(1e-5)

        return run

    for name, peer in {
        "dp-accounting PLD": composed(dpa_pld.PLDAccountant),
        "dp-accounting RDP": composed(dpa_rdp.RdpAccountant),
    }.items():
        value, seconds, reason = attempt(peer, None, 2 * limit)
        if reason:
            failures.append(f"200 phases, {name}: {reason}")
        rows.append([name, "!" if reason else f"{value:.6f}", f"{seconds:.1f}"])
    return table(["", "epsilon", "CPU s"], rows)


def steps_block() -> str:
    """The same step, 100 to a million times."""
    rows = []
    for exponent in range(2, 7):
        setting = Setting("", 0.01, 4.0, 10**exponent, 1e-5)
        seconds = cpu_seconds(lambda s=setting: tacit.epsilon(s.event, delta=s.delta), repeats=25)
        epsilon = tacit.epsilon(setting.event, delta=setting.delta)
        rows.append([f"{setting.steps:,}", f"{epsilon:.6f}", f"{1e3 * seconds:.2f}"])
    return table(["steps", "epsilon", "ms"], rows)


class TooLong(Exception):
    """A peer passed the time limit."""


def attempt(call: Callable, argument: object, limit: float) -> tuple[float, float, str]:
    """(value, CPU seconds, why it failed or '') of one call, stopped after `limit` seconds."""
    value = math.nan

    def run() -> None:
        nonlocal value
        value = float(call(argument))

    start = time.process_time()
    try:
        with stopped_after(limit):
            seconds = cpu_seconds(run, repeats=3, enough=1.0)
    except TooLong:
        reason = f"no answer within {limit:.0f} s"
    except Exception as failure:  # a peer may raise anything; that is the finding
        reason = f"{type(failure).__name__}: {str(failure)[:100]}"
    else:
        return value, seconds, ""
    return math.nan, time.process_time() - start, reason


@contextlib.contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # CPU time: a busy machine is no excuse
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


if __name__ == "__main__":
    assert prv_accountant  # imported for its version
    main()

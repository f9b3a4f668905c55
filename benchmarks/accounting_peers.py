"""Prices of tacit at the settings that the test suites of other libraries use.

    python benchmarks/accounting_peers.py    (needs dp-accounting; prv-accountant, autodp optional)

The tests of dp-accounting are run as they are, and every epsilon or delta that its accountants
return in them is recorded together with the event that was priced. Settings of the other suites
are listed below with their source; for Opacus, so are the values that its tests expect.

A price of tacit is *above* if it exceeds that of the peer by more than 1e-6 of it, while the
certified lower end of tacit does not exceed the price of the peer. If the lower end does, the price
of the peer is *too small*: no mechanism of that kind satisfies it.
"""

import contextlib
import importlib
import io
import math
import time
import unittest
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from _results import table, write

import tacit
from tacit import events as ev
from tacit.errors import TacitError
from tacit.events import Relation

SLACK = 1e-6
SUITES = (
    "pld.pld_privacy_accountant_test",
    "rdp.rdp_privacy_accountant_test",
    "mechanism_calibration_test",
)
OPACUS = "Opacus, opacus/tests/accountants_test.py"
PRV = "prv-accountant, tests/test_accountant.py and test_dpsgd.py"
AUTODP = "autodp, test/unit_test_afa.py and test_dp_sgd_poisson_sampling_add_remove.py"


class Price(NamedTuple):
    """A price that a peer gives: epsilon at `delta`, or delta at `epsilon` if `is_delta`."""

    suite: str
    event: ev.Event
    relation: Relation
    at: float
    value: float
    is_delta: bool = False


def sampled(rate: float, noise: float, steps: int) -> ev.Event:
    """Return `steps` steps of DP-SGD."""
    step = ev.Gaussian(noise)
    return ev.Repeated(step if rate == 1 else ev.PoissonSampled(rate, step), steps)


def translated(event: Any) -> ev.Event | None:
    """Return an event of dp-accounting as one of tacit, or None if it has no counterpart.

    The noise multipliers of dp-accounting refer to the relation that the accountant was given, so
    replacement counts once.
    """
    kind = type(event).__name__.removesuffix("DpEvent")
    inner = translated(event.event) if hasattr(event, "event") else None
    if hasattr(event, "event") and inner is None:
        return None
    match kind:
        case "NoOp":
            return ev.Sequence(())
        case "NonPrivate":
            return ev.NonPrivate()
        case "Gaussian":
            return _noise(ev.Gaussian, event.noise_multiplier)
        case "Laplace":
            return _noise(ev.Laplace, event.noise_multiplier)
        case "DiscreteLaplace":
            if event.noise_parameter == 0:
                return ev.NonPrivate()
            return ev.DiscreteLaplace(1 / event.noise_parameter, event.sensitivity, 1.0)
        case "RandomizedResponse":
            if event.num_buckets == 1:
                return ev.Sequence(())
            if event.noise_parameter == 0:
                return ev.NonPrivate()
            return ev.RandomizedResponse(event.noise_parameter, event.num_buckets)
        case "MixtureOfGaussians":
            weights = tuple(event.sampling_probs)
            if max(event.sensitivities) == 0:
                return ev.Sequence(())
            if event.standard_deviation == 0:
                return ev.NonPrivate()
            return ev.GaussianMixture(event.standard_deviation, tuple(event.sensitivities), weights)
        case "ZC" if event.xi == 0:
            return ev.ZeroConcentratedDP(event.rho, replace_factor=1.0)
        case "SingleEpochTreeAggregation" if event.noise_multiplier > 0:
            counts = event.step_counts
            most = max(counts) if isinstance(counts, list | tuple) else counts
            return ev.TreeAggregation(event.noise_multiplier, most, 1.0) if most else None
        case "TruncatedSubsampledGaussian":
            noise = ev.Gaussian(event.noise_multiplier)
            # dp-accounting counts the record that is removed, tacit the records that stay.
            sizes = event.truncated_batch_size, event.dataset_size - 1
            return ev.TruncatedPoissonSampled(event.sampling_probability, *sizes, noise)
        case "PoissonSampled":
            return ev.PoissonSampled(event.sampling_probability, inner)
        case "SampledWithoutReplacement":
            return ev.FixedSizeSampled(event.sample_size, event.source_dataset_size, inner)
        case "SampledWithReplacement":
            return ev.SampledWithReplacement(event.sample_size, event.source_dataset_size, inner)
        case "RepeatAndSelect":
            law = {
                0.0: ev.Trials.LOGARITHMIC,
                1.0: ev.Trials.GEOMETRIC,
                math.inf: ev.Trials.POISSON,
            }
            if event.shape in law:
                return ev.BestOf(inner, event.mean, law[event.shape])
            return ev.BestOf(inner, event.mean, ev.Trials.NEGATIVE_BINOMIAL, event.shape)
        case "SelfComposed":
            return ev.Repeated(inner, event.count)
        case "Composed":
            parts = [translated(part) for part in event.events]
            return None if None in parts else ev.Sequence(tuple(parts))
    return None


def _noise(kind: type, multiplier: float) -> ev.Event:
    if multiplier == 0:
        return ev.NonPrivate()
    return ev.Sequence(()) if multiplier == math.inf else kind(multiplier, 1.0)


def dp_accounting_prices() -> list[Price]:
    """Run the tests of dp-accounting and return every price that its accountants gave in them."""
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    found: list[Price] = []
    relations = {1: Relation.ADD_REMOVE, 2: Relation.REPLACE_ONE, 3: Relation.ZERO_OUT}

    def record(accountant: type, name: str) -> None:
        own = getattr(accountant, name)

        def get(self: Any, target: float) -> float:
            value = own(self, target)
            event = translated(self.ledger)
            relation = relations[self.neighboring_relation.value]
            # For dp-accounting, a blanked record answers uniformly; tacit prices any other answer.
            is_other = relation is Relation.ZERO_OUT and "randomized response" in str(event)
            if event is not None and not is_other:
                suite = f"dp-accounting {accountant.__name__}"
                found.append(Price(suite, event, relation, target, value, name == "get_delta"))
            return value

        def by_name(self: Any, target_delta: float = 0.0, target_epsilon: float = 0.0) -> float:
            return get(self, target_epsilon if name == "get_delta" else target_delta)

        def either(self: Any, *args: float, **named: float) -> float:
            return get(self, *args) if args else by_name(self, **named)

        setattr(accountant, name, either)

    for accountant in (PLDAccountant, RdpAccountant):
        for name in ("get_epsilon", "get_delta"):
            record(accountant, name)
    for suite in SUITES:
        module = importlib.import_module(f"dp_accounting.{suite}")
        tests = unittest.defaultTestLoader.loadTestsFromModule(module)
        with contextlib.redirect_stderr(io.StringIO()):
            ran = unittest.TextTestRunner(stream=io.StringIO()).run(tests)
        print(f"{suite}: {ran.testsRun} tests, {len(found)} prices so far", flush=True)
    return list(dict.fromkeys(found))


def opacus_prices() -> Iterator[Price]:
    """Yield the values that the tests of Opacus expect, pytorch/opacus at commit 030b723."""
    run, add = sampled(0.04, 1.5, 2250), Relation.ADD_REMOVE
    yield Price(f"{OPACUS}, RDP", run, add, 1e-5, 7.32911117143)
    yield Price(f"{OPACUS}, GDP", run, add, 1e-5, 6.6)
    yield Price(f"{OPACUS}, RDP", sampled(0.04, 1.416, 2250), add, 1e-5, 8.0)
    yield Price(f"{OPACUS}, RDP", sampled(0.04, 1.3562, 2000), add, 1e-5, 8.0)
    yield Price(f"{OPACUS}, GDP", sampled(0.04, 1.3232421875, 2250), add, 1e-5, 8.0)


def prv_prices() -> Iterator[Price]:
    """Yield the upper ends that prv-accountant gives at the settings of its tests."""
    from prv_accountant import PRVAccountant
    from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism

    settings = [
        *((1.0, 100.0, steps, 1e-5) for steps in (10_000, 10_001, 10_002)),
        (256 / 100_000, 0.9, 4900, 1e-5),
        *((2e-3, noise, 10_000, 1e-7) for noise in (0.6, 0.8, 1.0)),
        *((256 / 50_000, noise, int(50 * 50_000 / 256), 1e-5) for noise in (0.5, 0.7)),
    ]
    for rate, noise, steps, delta in settings:
        law = PoissonSubsampledGaussianMechanism(sampling_probability=rate, noise_multiplier=noise)
        accountant = PRVAccountant(
            prvs=[law], max_self_compositions=[steps], eps_error=0.1, delta_error=delta / 1000
        )
        upper = accountant.compute_epsilon(delta=delta, num_self_compositions=[steps])[2]
        yield Price(PRV, sampled(rate, noise, steps), Relation.ADD_REMOVE, delta, float(upper))


def autodp_prices() -> Iterator[Price]:
    """Yield the prices of autodp at the settings of its tests."""
    from autodp.mechanism_zoo import ExactGaussianMechanism
    from autodp.transformer_zoo import AmplificationBySampling, Composition

    for noise in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0):
        for delta in (1e-10, 1e-9, 1e-8, 1e-7, 1e-6):
            value = float(ExactGaussianMechanism(noise).get_approxDP(delta))
            yield Price(AUTODP, ev.Gaussian(noise), Relation.ADD_REMOVE, delta, value)
    for rate in (0.01, 0.1):
        for noise in (0.5, 1.0, 2.0):
            for steps in (1, 100, 10_000):
                one = AmplificationBySampling(PoissonSampling=True)(
                    ExactGaussianMechanism(noise), rate, improved_bound_flag=True
                )
                value = float(Composition()([one], [steps]).get_approxDP(1e-5))
                yield Price(AUTODP, sampled(rate, noise, steps), Relation.ADD_REMOVE, 1e-5, value)


def all_prices() -> Iterator[Price]:
    """Yield the prices of all peers; those that are not installed are left out, which is said."""
    yield from dp_accounting_prices()
    yield from opacus_prices()
    for peer in (prv_prices, autodp_prices):
        try:
            yield from peer()
        except ImportError as missing:
            print(f"left out: {missing}", flush=True)


def verdict(price: Price) -> tuple[str, float, float]:
    """Return how tacit compares with one price of a peer, and both ends of its bracket."""
    slack = SLACK * abs(price.value) + 1e-12
    try:
        if price.is_delta:
            upper = tacit.delta(price.event, epsilon=price.at, relation=price.relation)
            if upper <= price.value + slack:
                return "at most", math.nan, upper
            # delta is too small at this epsilon if the epsilon at this delta is above it.
            found = tacit.bracket(price.event, delta=max(price.value, 0), relation=price.relation)
            return "too small" if found.lower > price.at else "above", found.lower, upper
        found = tacit.bracket(price.event, delta=price.at, relation=price.relation)
    except TacitError as error:
        return f"not priced: {error}"[:90], math.nan, math.nan
    if found.upper <= price.value + slack:
        return "at most", *found
    return "too small" if found.lower > price.value else "above", *found


def main() -> None:
    """Compare all prices and write results/accounting_peers.md."""
    warnings.simplefilter("ignore")
    counts: dict[str, dict[str, int]] = {}
    listed, slowest = [], (0.0, "")
    for price in all_prices():
        start = time.process_time()
        kind, lower, upper = verdict(price)
        slowest = max(slowest, (time.process_time() - start, f"{price.event} ({price.relation})"))
        word = kind.split(":")[0]
        counts.setdefault(price.suite, {}).setdefault(word, 0)
        counts[price.suite][word] += 1
        if kind != "at most":
            what = f"{price.event}"
            at = f"{'epsilon' if price.is_delta else 'delta'} {price.at:.3g}"
            row = [price.suite, what if len(what) < 160 else what[:157] + "...", at]
            listed.append([*row, f"{price.value:.7g}", f"[{lower:.7g}, {upper:.7g}]", kind])
            print(listed[-1], flush=True)
    words = ("at most", "too small", "above", "not priced")
    rows = [[suite, *(str(found.get(w, 0)) for w in words)] for suite, found in counts.items()]
    write(
        "accounting_peers",
        "Prices at the settings of other libraries' tests",
        ("tacit", "dp-accounting", "prv-accountant", "autodp"),
        table(["suite", "tacit at most", "peer too small", "tacit above", "not priced"], rows),
        f"Slowest price of tacit: {slowest[0]:.2f} s, {slowest[1]}.",
        table(["suite", "event", "at", "peer", "tacit, both ends", "verdict"], listed),
    )


if __name__ == "__main__":
    main()

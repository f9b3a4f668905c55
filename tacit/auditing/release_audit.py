"""Audit of everything that releases through `tacit.mechanisms`: mechanisms, PATE, regressions.

An algorithm hands exact values to mechanisms and computes its result from what they release. While
it runs, the audit records each call: the mechanism, the exact value, and the release. Four things
are tested:

- law: the noise of every call has the billed law and scale;
- sensitivity: the exact values of two neighboring data sets differ by at most the sensitivity that
  the mechanism was given. The second run is handed the releases of the first, so that adaptive
  algorithms compute the values of both data sets at the same point;
- post-processing: with equal releases, both data sets give the same result. A result that differs
  contains something that no mechanism released, such as a label without noise;
- bill: the price of the recorded calls is at most the price of the stated event.

The recorded values are private. They leave this module as p-values alone.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from scipy import integrate, special

from tacit import accounting, mechanisms
from tacit._arrays import Floats, Indices
from tacit.auditing.draws import draw_findings
from tacit.auditing.fresh_keys import key_findings
from tacit.auditing.p_values import Finding, MechanismAudit, checks, deterministic
from tacit.auditing.pure_noise import noise_findings
from tacit.auditing.simulated_price import SIMULATED_DELTA, gaussian_of, price_findings
from tacit.events import Event, PoissonSampled, Relation, Sequence
from tacit.mechanisms import Mechanism, Rng, Seed, generator
from tacit.sampling import Poisson

_VALUES = 4000  # noisy numbers or choices that a test of the law uses
_MOST_RUNS = 200
_ROUNDING = 1e-6  # relative difference that rounding of sums may cause
_CHOICES = 6000  # choices show less of their noise than numbers do
_DRAWS = 128  # samples whose members are compared with the billed rate
_FRESH = 64  # numbers that are drawn under a fresh key
_DELTA = 1e-5  # delta at which prices are compared


class Call(NamedTuple):
    """One release: the mechanism, the exact value, which is private, and what was released."""

    mechanism: Any
    value: Any
    output: Any


class Result(NamedTuple):
    """What an algorithm gives out, as one array, and the event that it is billed as."""

    released: Any
    event: Event


def audit_mechanism(
    mechanism: Mechanism, *, confidence: float = 0.95, rng: Seed = None
) -> MechanismAudit:
    """Test the law of a mechanism's noise against the event that it is billed as.

    Vectors are released as zeros. Selections choose between two scores whose distance shows the
    scale of the noise best.

    >>> from tacit.mechanisms import GaussianMechanism
    >>> good = audit_mechanism(GaussianMechanism(2.0, l2_sensitivity=3.0), rng=0)
    >>> "variance in all" in [finding.name for finding in good.findings]
    True
    """
    random, kind = generator(rng), type(mechanism).__name__
    if _is_selection(mechanism):
        # Two options of distance 2.2 scales: most information about the scale of the noise.
        value, n_calls = np.array([2.2 * choice_scale(mechanism), 0.0]), _CHOICES
        fresh = functools.partial(_choices, mechanism)
    else:
        size = getattr(mechanism, "dimension", 64)
        value, n_calls = np.zeros(size, np.int64), max(2, _VALUES // size)
        fresh = functools.partial(mechanism.release, value)
    calls = [Call(mechanism, value, mechanism.release(value, random)) for _ in range(n_calls)]
    findings = [
        *law_findings(calls, random, part=kind),
        *key_findings(fresh, part=kind),
        *_price_findings(mechanism.event, random, kind),
    ]
    return MechanismAudit(findings=tuple(findings), confidence=confidence)


def audit_algorithm(
    fit: Callable[[Any], Result],
    neighbors: list[tuple[Any, Any]],
    *,
    part: str,
    confidence: float = 0.95,
    relation: Relation = Relation.ADD_REMOVE,
    is_parallel: bool = False,
    rng: Seed = None,
) -> MechanismAudit:
    """Audit an algorithm that releases through mechanisms.

    `fit` runs the algorithm on one data set, with fresh noise, and returns its result and its
    billed event. `neighbors` are pairs of data sets that differ by one record; include extreme
    records. Algorithms that draw samples are not compared on neighbors: their draws differ. With
    `is_parallel`, records are divided among the releases, and the bill covers what one record can
    move; otherwise it covers all releases.
    """
    random = generator(rng)
    calls, billed = _many_calls(fit, neighbors[0][0])
    is_sampled = _is_sampled(billed)
    findings = list(law_findings(calls, random, part=part))
    skipped = []
    if is_sampled:
        findings += _draw_findings(fit, neighbors[0][0])
        skipped.append(f"{part}: sensitivity, because the draws of two data sets differ")
    else:
        findings += _neighbor_findings(fit, neighbors, part)
    if is_parallel and not is_sampled:
        findings += [_bill(fit, one, other, relation, part) for one, other in neighbors]
    else:
        findings.append(_bill(fit, neighbors[0][0], None, relation, part))
    findings += key_findings(lambda: generator(None).random(_FRESH), part=part)
    if relation == Relation.ADD_REMOVE:
        findings += _price_findings(billed, random, part)
    return MechanismAudit(
        findings=tuple(findings), not_tested=tuple(skipped), confidence=confidence
    )


@contextmanager
def recorded(replayed: list[Call] | None = None) -> Iterator[list[Call]]:
    """Record every release of a mechanism inside the block; the list is private.

    With `replayed`, the calls return the releases in that list, in order, instead of new ones.
    """
    calls: list[Call] = []
    kinds = [kind for kind in _kinds() if "release" in vars(kind)]
    genuine = {kind: vars(kind)["release"] for kind in kinds}
    depth = 0

    def wrapped(kind: type) -> Callable[..., Any]:
        def release(self: Any, value: Any, rng: Seed = None) -> Any:
            nonlocal depth
            depth += 1
            try:
                output = genuine[kind](self, value, rng)
            finally:
                depth -= 1
            if depth == 0:
                if replayed is not None and len(calls) < len(replayed):
                    old = replayed[len(calls)].output
                    output = old if np.shape(old) == np.shape(output) else output
                calls.append(Call(self, np.array(value, copy=True), np.array(output, copy=True)))
            return output

        return release

    for kind in kinds:
        kind.release = wrapped(kind)  # type: ignore[attr-defined]  # all have the method
    try:
        yield calls
    finally:
        for kind, release in genuine.items():
            kind.release = release  # type: ignore[attr-defined]  # as above


def law_findings(calls: list[Call], random: Rng, *, part: str) -> tuple[Finding, ...]:
    """Test the noise of recorded calls: residuals of vectors, and choices of selections."""
    findings: list[Finding] = []
    added = [call for call in calls if not _is_selection(call.mechanism)]
    chosen = [call for call in calls if _is_selection(call.mechanism)]
    if added:
        scores = np.concatenate([normal_scores(call, random).ravel() for call in added])
        width = max(1, min(64, len(scores) // 2))
        table = scores[: len(scores) // width * width].reshape(-1, width)
        listed = noise_findings(table, [width], part=part)
        # Coarse grids repeat values by design, and one tensor has no other one to resemble.
        findings += [f for f in listed if "tensors" not in f.name and "twice" not in f.name]
        findings.append(Finding(part, "noise is not used twice", _reused(added)))
    if chosen:
        findings += _choice_findings(chosen, random, part)
    return tuple(findings)


def normal_scores(call: Call, random: Rng) -> Floats:
    """Return numbers that are independent standard normal if a call's noise is as billed.

    Residuals are passed through the billed distribution function and the inverse normal one. A
    discrete law is made continuous by `random` numbers between its steps.
    """
    mechanism = call.mechanism
    residual = np.asarray(call.output, np.float64) - np.asarray(call.value, np.float64)
    if isinstance(mechanism, mechanisms.GaussianMechanism):
        return residual / (mechanism.event.noise_multiplier * mechanism.l2_sensitivity)
    if isinstance(mechanism, mechanisms.LaplaceMechanism):
        scaled = residual / (mechanism.event.noise_multiplier * mechanism.l1_sensitivity)
        return -np.sign(scaled) * special.ndtri(0.5 * np.exp(-np.abs(scaled)))
    uniform = random.random(residual.shape)
    if isinstance(mechanism, mechanisms.DiscreteLaplaceMechanism):
        log_mass = -np.arange(4000) * mechanism.epsilon / mechanism.l1_sensitivity
    else:
        std = mechanism.noise_multiplier * mechanism.l2_sensitivity
        log_mass = -(np.arange(4000) ** 2) / (2 * std**2)
    mass = np.exp(log_mass)
    mass /= 2 * mass.sum() - mass[0]
    above = np.append(np.cumsum(mass[::-1])[::-1], 0.0)  # P[noise >= k]
    k = np.minimum(np.abs(residual).round().astype(int), 3999)
    # P[noise > |k|] plus a random share of P[noise = |k|]; a zero has either sign.
    tail = above[k + 1] + uniform * np.where(k == 0, mass[0] / 2, mass[k])
    sign = np.where(k == 0, np.where(random.random(k.shape) < 0.5, -1.0, 1.0), np.sign(residual))
    return -sign * special.ndtri(tail)


def choice_scale(mechanism: Any) -> float:
    """Return the scale of the noise on each score that a selection is billed for."""
    if isinstance(mechanism, mechanisms.GaussianNoisyMax):
        return mechanism.event.noise_multiplier * mechanism.l2_sensitivity
    return (1 if mechanism.monotonic else 2) * mechanism.sensitivity / mechanism.event.epsilon


def choice_probabilities(mechanism: Any, scores: Floats, scale: float) -> Floats:
    """Return the probability of each option: that its score plus noise of `scale` is the largest.

    It is the integral over the noise t of option i of its density times the chance that every other
    option stays below; by the trapezoidal rule, except for the exponential mechanism's exact form.
    """
    gaps = (scores - scores.max()) / scale
    if isinstance(mechanism, mechanisms.ExponentialMechanism):
        return special.softmax(gaps)
    low, density, distribution = _law_of(mechanism)
    t = np.linspace(low, 40.0, 4001)
    found = np.empty(len(gaps))
    for i, gap in enumerate(gaps):
        below = distribution(t[:, None] + gap - np.delete(gaps, i)[None])
        found[i] = integrate.trapezoid(density(t) * below.prod(axis=1), t)
    return found / found.sum()


def _law_of(mechanism: Any) -> tuple[float, Callable[..., Floats], Callable[..., Floats]]:
    """Return the lowest value, the density and the distribution function of a score's noise."""
    if isinstance(mechanism, mechanisms.PermuteAndFlip):
        return 0.0, lambda t: np.exp(-t), lambda t: -np.expm1(-np.maximum(t, 0.0))
    if isinstance(mechanism, mechanisms.GaussianNoisyMax):
        return -40.0, lambda t: np.exp(-(t**2) / 2) / math.sqrt(2 * math.pi), special.ndtr
    return (
        -40.0,
        lambda t: np.exp(-np.abs(t)) / 2,
        lambda t: np.where(t < 0, np.exp(np.minimum(t, 0)) / 2, 1 - np.exp(-np.maximum(t, 0)) / 2),
    )


def _choice_findings(calls: list[Call], random: Rng, part: str) -> list[Finding]:
    """Test choices: are they surer than billed, and independent with the billed probabilities?"""
    cache: dict[tuple[Any, bytes], tuple[Floats, Floats]] = {}
    slopes, spreads, uniforms = [], [], []
    for call in calls:
        scores = np.asarray(call.value, np.float64)
        key = call.mechanism, scores.tobytes()
        if key not in cache:
            scale = choice_scale(call.mechanism)
            p, wide, narrow = (
                choice_probabilities(call.mechanism, scores, scale * factor)
                for factor in (1.0, 1.05, 1 / 1.05)
            )
            slope = np.log(np.maximum(narrow, 1e-300)) - np.log(np.maximum(wide, 1e-300))
            cache[key] = p, slope / (2 * math.log(1.05))
        p, slope = cache[key]
        index = int(call.output)
        slopes.append(slope[index] - p @ slope)
        spreads.append(p @ slope**2 - (p @ slope) ** 2)
        uniforms.append(min(1.0, p[:index].sum() + random.random() * p[index]))
    total = sum(spreads)
    z = sum(slopes) / math.sqrt(total) if total > 1e-12 else 0.0
    scores = special.ndtri(np.clip(uniforms, 1e-12, 1 - 1e-12))
    width = max(1, min(32, len(scores) // 2))
    table = scores[: len(scores) // width * width].reshape(-1, width)
    kept = ("normal law", "mean", "independence of steps", "independence of coordinates")
    return [
        # The score test: most powerful against noise of a slightly smaller scale.
        Finding(part, "choices are no surer than billed", float(special.ndtr(-z))),
        *(f for f in noise_findings(table, [width], part=part) if f.name in kept),
    ]


def _reused(calls: list[Call]) -> float:
    """Return 0 if two calls of four numbers or more have the same noise, else 1."""
    seen: set[bytes] = set()
    for call in calls:
        residual = np.asarray(call.output, np.float64) - np.asarray(call.value, np.float64)
        if residual.size < 4:
            continue
        scale = np.abs(residual).max()
        digest = np.round(residual.ravel() / (scale or 1.0), 6).tobytes()
        # Small whole numbers repeat by chance; twenty coordinates of them do not.
        is_discrete = not np.any(residual % 1) and residual.size < 20
        if digest in seen and not is_discrete:
            return 0.0
        seen.add(digest)
    return 1.0


def _many_calls(fit: Callable[[Any], Result], data: Any) -> tuple[list[Call], Event]:
    """Run an algorithm until its mechanisms have released enough for a test of their law."""
    calls: list[Call] = []
    event: Event | None = None
    size = 0
    for _ in range(_MOST_RUNS):
        with recorded() as new:
            event = fit(data).event
        calls += new
        size += sum(np.size(call.output) for call in new)
        if size >= _VALUES or not new:
            break
    assert event is not None
    return calls, event


def _neighbor_findings(
    fit: Callable[[Any], Result], neighbors: list[tuple[Any, Any]], part: str
) -> list[Finding]:
    is_bounded = is_same_kind = is_equal = True
    start: list[Call] = []
    for one, other in neighbors:
        with recorded() as first:
            result = fit(one).released
        start = start or first
        # Whatever follows from releases alone is equal for all data sets, neighbors or not.
        is_equal &= _is_function(fit, neighbors[0][0], one, start)
        with recorded(first) as second:
            again = fit(other).released
        if [call.mechanism for call in first] != [call.mechanism for call in second]:
            is_same_kind = False
            continue
        is_bounded &= all(map(_is_within, first, second))
        is_equal &= bool(np.array_equal(np.asarray(result), np.asarray(again), equal_nan=True))
    tests = {
        "mechanisms do not depend on the records": is_same_kind,
        "a record moves a value by its sensitivity at most": is_bounded,
        "the result follows from the releases alone": is_equal,
    }
    return checks(part, tests)


def _is_function(fit: Callable[[Any], Result], one: Any, other: Any, calls: list[Call]) -> bool:
    """Return whether two data sets give one result if their mechanisms release the same."""
    results = []
    for data in (one, other):
        with recorded(calls) as made:
            results.append(np.asarray(fit(data).released))
        if len(made) != len(calls) or any(
            np.shape(a.value) != np.shape(b.value) for a, b in zip(made, calls, strict=True)
        ):
            return True  # another number of releases: `neighbors` of other sizes
    return bool(np.array_equal(*results, equal_nan=True))


def _draw_findings(fit: Callable[[Any], Result], data: Any) -> list[Finding]:
    """Test the Poisson samples that an algorithm draws: rate, and independence."""
    drawn: list[tuple[int, Indices]] = []
    genuine = Poisson.indices

    def indices(self: Poisson, n: int, rng: Any = None) -> Indices:  # Any: any kind of seed
        found = genuine(self, n, rng)
        drawn.append((n, found))
        return found

    Poisson.indices = indices
    try:
        billed = fit(data).event
        while drawn and len(drawn) < _DRAWS:
            fit(data)
    finally:
        Poisson.indices = genuine
    sampled = (event for event in accounting.flatten(billed) if isinstance(event, PoissonSampled))
    rates = {event.rate for event in sampled}
    if len(rates) != 1 or len({n for n, _ in drawn}) != 1:
        return []  # no Poisson samples, or of several kinds
    n = drawn[0][0]
    table = np.array([np.bincount(found, minlength=n) for _, found in drawn[:_DRAWS]])
    return list(draw_findings(table.astype(np.float64), np.arange(n), rates.pop(), is_poisson=True))


def _is_within(one: Call, other: Call) -> bool:
    """Return whether two exact values differ by at most the sensitivity of their mechanism."""
    if np.shape(one.value) != np.shape(other.value):
        return False
    moved = (np.asarray(one.value, np.float64) - np.asarray(other.value, np.float64)).ravel()
    mechanism = one.mechanism
    slack = _ROUNDING * (1 + float(np.abs(np.asarray(one.value, np.float64)).max(initial=0.0)))
    if hasattr(mechanism, "l2_sensitivity"):
        return bool(np.linalg.norm(moved) <= mechanism.l2_sensitivity * (1 + _ROUNDING) + slack)
    if hasattr(mechanism, "l1_sensitivity"):
        return bool(np.abs(moved).sum() <= mechanism.l1_sensitivity * (1 + _ROUNDING) + slack)
    most = mechanism.sensitivity * (1 + _ROUNDING) + slack
    if isinstance(mechanism, mechanisms.ExponentialMechanism) and not mechanism.monotonic:
        return bool(np.ptp(moved) <= 2 * most)  # a shift of all scores changes nothing
    if mechanism.monotonic and moved.min() < -slack and moved.max() > slack:
        return False
    return bool(np.abs(moved).max() <= most)


def _bill(
    fit: Callable[[Any], Result], data: Any, other: Any, relation: Relation, part: str
) -> Finding:
    """Compare the stated event with the calls that were recorded.

    If a neighboring data set `other` is given, only calls whose value it changes are counted.
    """
    with recorded() as calls:
        billed = fit(data).event
    if other is not None:
        with recorded(calls) as again:
            fit(other)
        pairs = zip(calls, again, strict=True)
        calls = [a for a, b in pairs if not np.array_equal(a.value, b.value)]
    name = "the bill covers every release"
    if not calls:
        return Finding(part, name, 0.0)  # a result without any mechanism
    if _is_sampled(billed):
        used = sorted(call.mechanism.event.noise_multiplier for call in calls)
        is_covered = bool(np.allclose(sorted(_noises(billed)), used)) if used else False
        return Finding(part, name, deterministic(len(_noises(billed)) == len(used) and is_covered))
    whole = Sequence(tuple(call.mechanism.event for call in calls))
    if Counter(accounting.flatten(whole)) <= Counter(accounting.flatten(billed)):
        return Finding(part, name, 1.0)  # the bill names every release
    cost, stated = (
        accounting.epsilon(event, delta=_DELTA, relation=relation) for event in (whole, billed)
    )
    return Finding(part, name, deterministic(cost <= stated * (1 + 1e-3) + 1e-9))


def _price_findings(event: Event, random: Rng, part: str) -> list[Finding]:
    stated = accounting.epsilon(event, delta=SIMULATED_DELTA)
    return price_findings(event, stated, random, part=part)


def _choices(mechanism: Any) -> Floats:
    """Return choices between two equal scores, all under one fresh key."""
    fresh = generator(None)
    return np.array([mechanism.release(np.zeros(2), fresh) for _ in range(_FRESH)], np.float64)


def _noises(event: Event) -> list[float]:
    """Return the multipliers of all Gaussian noise in an event."""
    counts = accounting.flatten(event)
    found = [(gaussian_of(one), count) for one, count in counts.items()]
    return [one.noise_multiplier for one, count in found if one is not None for _ in range(count)]


def _is_sampled(event: Event) -> bool:
    # Sampled events hold the event of the sample.
    return any(hasattr(one, "event") for one in accounting.flatten(event))


def _is_selection(mechanism: Any) -> bool:
    return hasattr(mechanism, "sensitivity") or isinstance(mechanism, mechanisms.GaussianNoisyMax)


def _kinds() -> list[type]:
    """Return the classes of mechanisms and their base classes in tacit, most basic first."""
    public = [getattr(mechanisms, name) for name in mechanisms.__all__]
    kinds = [kind for kind in public if isinstance(kind, type) and hasattr(kind, "release")]
    bases = {base for kind in kinds if kind is not Mechanism for base in kind.__mro__[:-1]}
    return sorted(bases, key=lambda kind: len(kind.__mro__))

"""Audit of DP-SGD as it is configured: the user's model, settings and loop, through public calls.

Six parts of the mechanism are tested, each against the bill alone (`private.event`):

- noise: a run whose losses are zero releases noise and nothing else, in gradients and in released
  losses (`pure_noise`); so do long runs on a few records, whose lots are often empty, and the
  counts of adaptive clipping;
- draws: canaries at random places show who took part in each step (`draws`), in two runs, and in
  two on a few records, where a lot that is empty must add nothing;
- post-processing: weights, buffers, the optimizer's state and averages follow from the released
  gradients alone (`trainee`), and no number in a checkpoint depends on a record;
- sensitivity: releases of neighboring data sets with extreme records differ by at most the billed
  contribution (`sensitivity`);
- keys: two runs share no noise, even if the program's random generators start equal, the key comes
  from the operating system, every part of it matters, and no two purposes share a stream;
- bill: what the ledger was charged is the price of the rate, noise and steps that were measured,
  and a simulation of these steps does not refute that price (`simulated_price`).

Nothing private leaves: no test releases a value that depends on a record, apart from p-values of
artificial runs. The audit trains copies of the model and changes neither the model nor the ledger.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tacit import accounting
from tacit._arrays import Floats
from tacit._check import whole
from tacit.auditing.canaries import number_rows, with_canaries, with_table
from tacit.auditing.draws import draw_findings, turn_findings
from tacit.auditing.fresh_keys import key_findings, same_start
from tacit.auditing.p_values import Finding, MechanismAudit, checks, smallest
from tacit.auditing.pure_noise import noise_findings, shared_noise
from tacit.auditing.sensitivity import (
    TINY,
    TINY_LOSSES,
    Neighbors,
    contribution_finding,
    extreme_sets,
    times,
)
from tacit.auditing.simulated_price import SIMULATED_DELTA, gaussian_of, price_findings
from tacit.auditing.trainee import fingerprint
from tacit.auditing.training_setup import (
    PLANNED,
    Loss,
    Public,
    Releases,
    TrainingSetup,
    of_first_rank,
)
from tacit.auditing.user_audit import numbers_of_canaries, user_sets
from tacit.errors import BudgetExceeded
from tacit.events import (
    BandedGaussian,
    Event,
    Gaussian,
    GaussianMixture,
    NonPrivate,
    PoissonSampled,
    Relation,
    Repeated,
    Sequence,
)
from tacit.ledger import Budget
from tacit.mechanisms import Rng, Seed, generator

_TINY = 1e-9  # noise multiplier of runs that are to be seen through
_CANARIES = 500
_LONG = 192  # steps of a run on a few records
_MOST_VALUES = 2 * 10**7  # released numbers that a long run may add
_FOLLOWED = 12  # steps of a run that is followed
_PURPOSES = ("lot", "noise", "model", "counts", "loss")  # of what a run derives from its key
_ALIKE = 1e-3  # distance of gradients that differ by rounding, and by noise of 1e-9
_COUNT_MOVE = 0.5  # what one record adds to a centered count
_COUNTS = 1200  # noisy counts, enough to see that a tenth of their noise is missing
_NEAR = (1.02, 1.5, 3.0, 10.0, 100.0)  # norms of gradients, in clip norms
_USER_LOSSES = {"a user with huge losses": 1e6, "a user as they are": 1.0}
_OVERSHOOT = 1e3  # gradient of a canary before clipping, in clip norms
_DELTA = 1e-5  # delta at which two prices are compared
_SLACK = 1e-6  # relative difference between two computations of one price


def audit_training(
    setup: TrainingSetup, *, confidence: float = 0.95, steps: int = 64, rng: Seed = None
) -> MechanismAudit:
    """Audit the mechanism that `setup` describes, and return every test with its p-value.

    `steps` is the length of the runs with pure noise and with canaries. The chance that a correct
    mechanism is flagged is at most 1 - `confidence` for all tests together.

    >>> import torch, tacit
    >>> x = torch.randn(100, 3)
    >>> def loss_fn(model, batch):
    ...     x, y = batch
    ...     return (model(x).squeeze(1) - y) ** 2
    >>> setup = TrainingSetup(make_private=tacit.make_private, model=torch.nn.Linear(3, 1),
    ...                       dataset=(x, x.sum(1)), loss_fn=loss_fn,
    ...                       settings={"batch_size": 20, "epochs": 2, "clip_norm": 1.0,
    ...                                 "noise_multiplier": 1.0})
    >>> found = audit_training(setup, rng=0)
    >>> len(found.findings) > 20, found.to_dict()["family_wise_error"]
    (True, 0.05)
    """
    sigma, event, setup = _planned(setup)
    random, length = generator(rng), _whole_epochs(setup, whole(steps=steps, least=4))
    if sigma == 0:
        tests = {"a run without noise is billed as not private": isinstance(event, NonPrivate)}
        return MechanismAudit(
            findings=tuple(checks("bill", tests)),
            not_tested=("noise, draws and sensitivity: the run has no noise",),
            confidence=confidence,
        )
    noise = setup.releases(**setup.silent(), steps=length, noise_multiplier=sigma)
    drawn, skipped = _draws(setup, length, random)
    values, most = [setup.standardized(noise)], _MOST_VALUES // noise.values.shape[1] - length
    if (few := _of_few(setup)) is not None:
        if (long := min(_LONG, most)) > 0:
            changes = {**few.silent(), "steps": long, "noise_multiplier": sigma}
            values.append(few.standardized(few.releases(**changes)))
        p_values = [finding.p_value for finding in _draws(few, length, random)[0]]
        drawn += (Finding("draws", "draws from few records", smallest(p_values)),)
    if setup.settings.get("users") is not None and hasattr(setup.dataset, "columns"):
        skipped.append("users of a table: pass its columns as a tuple of arrays to test them")
    if setup.how != "resumed":
        skipped.append("restarts: how='resumed' tests them, for independent noise")
    findings = (
        *user_findings(setup),
        *noise_findings(np.concatenate(values), noise.sizes),
        *_keys(setup, sigma),
        *drawn,
        *_post_processing(setup, sigma),
        *_sensitivity(setup, sigma),
        *_counts(setup),
        *_bill(setup, noise, sigma, random),
    )
    if "seed" in setup.settings and setup.settings["seed"] is not None:
        skipped.append("the secrecy of the key: a seed was given, so the noise is reproducible")
    return MechanismAudit(findings=findings, not_tested=tuple(skipped), confidence=confidence)


def _planned(setup: TrainingSetup) -> tuple[float, Event, TrainingSetup]:
    """Return the noise multiplier before any schedule, and the event, of the user's own run.

    The third result is the setup with the number of bands that the run has chosen, if it had to.
    """
    given = {name: setup.settings[name] for name in PLANNED if name in setup.settings}
    run = setup.run(setup.trainee(), **given)
    schedule = getattr(setup.settings.get("noise"), "schedule", None)
    first = 1.0 if schedule is None else schedule(0, run.steps)
    if setup.banded is not None:
        banded = replace(setup.banded, bands=run.info.get("bands", 1))
        noise = setup.noise_with(correlated=banded)
        setup = replace(setup, settings={**setup.settings, "noise": noise})
    return run.info["noise_multiplier"] / first, run.event, setup


def _whole_epochs(setup: TrainingSetup, steps: int) -> int:
    """Return `steps`, rounded up to whole epochs if the sampler draws an epoch at once."""
    epoch = getattr(setup.sampler, "steps", 1)
    turns = getattr(setup.banded, "bands", 1)  # at least four for each record
    return -(-max(steps, 4 * turns) // epoch) * epoch


def _of_few(setup: TrainingSetup) -> TrainingSetup | None:
    """Return the setup on a few records, a third of whose lots is empty; None for a table."""
    if hasattr(setup.dataset, "columns"):
        return None
    _, (few, *_) = next(extreme_sets(setup.dataset, setup.loss_fn))
    changes = {"batch_size": 1, "n_records": few.size, "users": None}
    return replace(setup, dataset=few.with_it, settings={**setup.settings, **changes})


def _keys(setup: TrainingSetup, sigma: float) -> list[Finding]:
    """Test that runs share no noise although all generators of the program start equal."""
    zero: dict[str, Any] = {
        **setup.silent(),
        "steps": 2,
        "noise_multiplier": sigma,
    }
    if setup.sampler is not None:  # it may draw more steps at once; noise does not depend on lots
        zero["batch_size"] = 1

    def draw() -> Floats:
        return setup.standardized(setup.releases(**zero))

    seeded = [setup.standardized(setup.releases(**zero, seed=seed)) for seed in (1, 2)]
    key = setup.run(setup.trainee(), **zero)._lots.key  # what it makes of a purpose shows nowhere
    streams = {key.bytes(purpose, 0, 32) for purpose in _PURPOSES}
    return [
        *key_findings(draw, part="keys", shared=shared_noise),
        Finding("keys", "two seeds share no noise", shared_noise(*seeded)),
        *checks("keys", {"no two purposes share a stream": len(streams) == len(_PURPOSES)}),
    ]


def _draws(setup: TrainingSetup, steps: int, random: Rng) -> tuple[tuple[Finding, ...], list[str]]:
    """Replace records at random places by canaries, and test who took part in each step."""
    if not hasattr(setup.dataset, "__getitem__") or hasattr(setup.dataset, "columns"):
        return (), ["draws: canaries cannot take the place of records in this kind of data set"]
    n = len(setup.dataset) if not isinstance(setup.dataset, tuple) else len(setup.dataset[0])
    numbers, places = numbers_of_canaries(setup.settings.get("users"), n, _CANARIES, random)
    if not len(places):
        return (), ["draws: every user has more records than the bound, so some are left out"]
    dataset, unpack = number_rows(setup.dataset, numbers)
    rule = setup.rule
    # The table of canaries fits no rule with bounds for given layers; draws do not depend on it.
    clip_norm = rule if len(getattr(rule, "clip_norms", (1,))) == 1 else rule.l2_sensitivity
    changed: dict[str, Any] = {"clip_norm": clip_norm, "noise": setup.noise_with(schedule=None)}
    changed |= {"steps": steps, "noise_multiplier": _TINY}
    changed |= _for_numbers(setup, unpack)
    bound = float(getattr(clip_norm, "clip_norm", clip_norm))
    changed |= {
        "model": with_table(setup.model, len(places)),
        "dataset": dataset,
        "loss_fn": with_canaries(times(setup.loss_fn, 0.0), unpack, _OVERSHOOT * bound),
    }
    runs, event = [], None
    for _ in range(2):  # the lots of two runs are compared too
        with same_start():
            found = setup.releases(**changed)
        event = found.run.training_event
        table = found.names.index("canaries.weight")
        first = sum(found.sizes[:table]) + 1  # row 0 of the table is for ordinary records
        units = [public["clip_norms"][0] / public["expected_batch"] for public in found.facts]
        runs.append(found.values[:, first : first + len(places)] / np.array(units)[:, None])
    # Automatic clipping shortens every gradient a little, so a contribution is just below 1.
    runs = [np.where((seen > 1 - 2e-2) & (seen < 1), 1.0, seen) for seen in runs]
    if isinstance(event, BandedGaussian):
        return turn_findings(runs, places, event), []
    assert event is not None
    rate = _steps_of(event)[0].rate
    is_poisson = rate is not None
    skipped = [] if is_poisson else ["the law of the draws: only that of Poisson sampling is known"]
    seen = np.concatenate(runs)
    return draw_findings(seen, places, rate or 0.0, is_poisson=is_poisson), skipped


def _post_processing(setup: TrainingSetup, sigma: float) -> list[Finding]:
    """Test that what a run on real records keeps follows from its releases, bit for bit.

    The user's own optimizer and average move in it, and a copy follows its releases alone.
    """
    steps, rule = _whole_epochs(setup, _FOLLOWED), setup.banded
    trained = setup.releases(steps=steps, noise_multiplier=sigma, is_moving=True).trainee
    averaged = 0 if rule is None or rule.bands == 1 else int(rule.average * steps)
    twin, found, last = setup.trainee(is_moving=True), [], []
    for step in trained.steps:
        found.append(twin.follow(step))
        last = [*last, twin.weights][-averaged:] if averaged else []
    if averaged:  # such a run ends with the mean of its last weights, up to rounding
        mean = np.mean(last, axis=0)
        is_mean = np.allclose(trained.weights, mean, rtol=1e-4, atol=1e-6 * np.abs(mean).max())
        found[-1]["weights"] = is_mean
    tests = {name: all(one[name] for one in found) for name in found[0]}
    return checks("post-processing", {f"{n} follow from releases": t for n, t in tests.items()})


def _sensitivity(setup: TrainingSetup, sigma: float) -> list[Finding]:
    """Compare releases of data sets with and without one extreme record, at rate 1."""
    if hasattr(setup.dataset, "columns"):
        return []
    kinds = list(extreme_sets(setup.dataset, setup.loss_fn))
    is_repeatable = _is_repeatable(setup, kinds[0][1][0])
    findings, natural = [], np.inf
    for name, sets in kinds:
        lengths = [_contribution(setup, one, is_repeatable=is_repeatable) for one in sets]
        findings.append(contribution_finding(name, max(lengths)))
        if name == TINY_LOSSES:
            natural = lengths[0] / TINY
    first = kinds[0][1][0]
    # Adaptive clipping and correlated noise keep what was released.
    noise = setup.noise_with(schedule=None, correlated=None)
    plain: dict[str, Any] = {"clip_norm": setup.rule, "noise": noise}
    states = [
        fingerprint(of_first_rank(_full(setup, data, *first[2:4], **plain).run.state_dict()))
        for data in first[:2]
    ]
    same = {"a checkpoint does not depend on a record": states[0] == states[1]}
    findings += checks("post-processing", same)
    if 0 < natural < 1 / TINY:
        near = [first._replace(loss_fn=times(setup.loss_fn, r / natural)) for r in _NEAR]
        lengths = [_contribution(setup, one, is_repeatable=is_repeatable) for one in near]
        findings.append(contribution_finding("gradients near the bound", max(lengths)))
    if is_repeatable:
        findings += _noise_on_records(setup, first, sigma)
    return findings


def user_findings(setup: TrainingSetup) -> list[Finding]:
    """Compare releases with and without all records of one user, at rate 1."""
    users = setup.settings.get("users")
    if users is None or hasattr(setup.dataset, "columns"):
        return []
    findings = []
    for name, factor in _USER_LOSSES.items():
        loss_fn, longest = times(setup.loss_fn, factor), 0.0
        for one in user_sets(setup.dataset, users):
            runs = [
                _full(setup, data, loss_fn, one.size, users=ids)
                for data, ids in (one.with_user, one.without)
            ]
            longest = max(longest, _moved(setup, runs) / _billed_moves(runs[0]))
        findings.append(contribution_finding(name, longest))
    return findings


def _billed_moves(releases: Releases) -> float:
    """Return by how many clip norms a user may move a step of the run, by its event."""
    event: Any = releases.run.training_event  # Any: an event of any type
    while not isinstance(event, Gaussian | GaussianMixture):
        event = event.event
    most = max(event.shifts) if isinstance(event, GaussianMixture) else 1.0
    return most * releases.facts[0]["noise_multiplier"] / event.noise_multiplier


def _moved(setup: TrainingSetup, pair: list[Releases]) -> float:
    """Return the distance of two releases of one step, in units that the noise is billed for."""
    one, other = pair
    moved = (one.values - other.values)[0] / setup.scales(one, one.facts[0])
    length = float(np.linalg.norm(moved)) / one.run.arithmetic.noise_factor
    return length if np.isfinite(length) else np.inf


def _contribution(setup: TrainingSetup, one: Neighbors, *, is_repeatable: bool) -> float:
    """Return how far a record moves a release, in units of the billed contribution.

    If the gradient of a record depends on random numbers, such as dropout, the other records are
    given a loss of zero, since they would get other random numbers in the two runs.
    """
    pair = []
    for data, numbers in (
        (one.with_it, np.arange(one.size) == one.place),
        (one.without, np.zeros(one.size - 1)),
    ):
        if is_repeatable:
            pair.append(_full(setup, data, one.loss_fn, one.size))
            continue
        dataset, unpack = number_rows(data, numbers.astype(np.int64))
        loss_fn = _only_numbered(one.loss_fn, unpack)
        pair.append(_full(setup, dataset, loss_fn, one.size, **_for_numbers(setup, unpack)))
    return _moved(setup, pair)


def _full(setup: TrainingSetup, dataset: Any, loss_fn: Loss, size: int, **changes: Any) -> Releases:
    """Return a run in which every record is in every lot."""
    options: dict[str, Any] = {
        "batch_size": size,
        "n_records": size,
        "seed": 0,
        "steps": 1,
        "noise_multiplier": _TINY,
        "noise": setup.noise_with(schedule=None),
        "dataset": dataset,
        "users": None,  # they name an owner for each record of the user's data set
    }
    return setup.releases(loss_fn=loss_fn, **options | changes)


def _noise_on_records(setup: TrainingSetup, one: Neighbors, sigma: float) -> list[Finding]:
    """Test noise that is added to real gradients: full lots whose sums are equal in every step."""
    if setup.settings["clip_norm"] is not setup.rule:  # clip norms change from step to step
        return []
    bands = getattr(setup.banded, "bands", 1)
    steps = max(64, 2 * bands) + (bands if bands > 1 else 0)
    options: dict[str, Any] = {"steps": steps, "noise_multiplier": sigma, "seed": None}
    found = _full(setup, one.with_it, one.loss_fn, one.size, **options)
    # Sums repeat after as many steps as there are bands, each of which is the turn of a group.
    values = setup.standardized(found)[bands if bands > 1 else 0 :]
    pairs = values[: len(values) - len(values) % (2 * bands)].reshape(-1, 2, bands, values.shape[1])
    noise = ((pairs[:, 0] - pairs[:, 1]) / np.sqrt(2)).reshape(-1, values.shape[1])
    listed = noise_findings(noise, found.sizes, part="noise on records")
    # Differences of numbers of limited precision coincide more often than the numbers do.
    return [finding for finding in listed if "twice" not in finding.name]


def _is_repeatable(setup: TrainingSetup, one: Neighbors) -> bool:
    """Return whether the model computes the same gradient under any seed: no dropout."""
    runs = [_full(setup, one.with_it, one.loss_fn, one.size, seed=seed) for seed in (1, 2)]
    return _moved(setup, runs) < _ALIKE


def _counts(setup: TrainingSetup) -> list[Finding]:
    """Test the counts of adaptive clipping, which the released clip norms show."""
    rule = setup.adaptive
    if rule is None:
        return []
    # Lots of one record in 10^9 are empty: the counts are 0, and what is released is noise.
    noise = replace(rule, count_noise_std=None)
    rare = _shares(setup, [True], noise, n_records=10**9, steps=_COUNTS + 1)
    values = (rare - 0.5) / noise.noise_std(1)
    listed = noise_findings(values.reshape(-1, 8), [8], part="counts")  # in rows of eight
    quiet, is_within = replace(rule, count_noise_std=_TINY), [True, False, True, False]
    n = len(is_within)
    all_of_them, *others = (
        n * _shares(setup, kept, quiet, batch_size=n, n_records=n, steps=2)[0, 0]
        for kept in (is_within, is_within[1:], is_within[:-1])
    )
    moved = max(abs(all_of_them - share) for share in others)
    is_bounded = moved <= _COUNT_MOVE * (1 + 1e-3)
    return [
        *checks("counts", {"a record moves a count by its half at most": is_bounded}),
        *(finding for finding in listed if "tensors" not in finding.name),
    ]


def _shares(setup: TrainingSetup, is_within: list[bool], rule: Any, **settings: Any) -> Floats:
    """Return the noisy shares of unclipped records in all steps but the last, which show in norms.

    The records are artificial: those within the bound have no gradient, the others a huge one.
    """
    import torch

    artificial = TrainingSetup(
        make_private=setup.make_private,
        model=torch.nn.Embedding(2, 1),
        dataset=(torch.tensor([not within for within in is_within]).long(),),
        loss_fn=lambda model, batch: model(batch[0]).squeeze(1) * batch[0] * 1e12,
        settings={"batch_size": 1, "clip_norm": replace(rule, start=1.0)},
        how=setup.how,
    )
    found = artificial.releases(**settings, noise_multiplier=1.0)
    norms = np.log([public["clip_norms"] for public in found.facts])  # (steps, 1)
    return rule.quantile - np.diff(norms, axis=0) / rule.learning_rate


class _StepBill(NamedTuple):
    rate: float | None  # of Poisson sampling; None for other samplers
    noise_multiplier: float  # nan if it cannot be told from that of counts
    records: int = 1  # of a user that are billed


def _steps_of(event: Event) -> list[_StepBill]:
    """Return the billed steps in `event`, in any order: sampling rate and noise of the gradient."""
    if isinstance(event, Repeated):
        return _steps_of(event.event) * event.count
    if isinstance(event, PoissonSampled):
        return [_StepBill(event.rate, _gradient_noise(event.event))]
    if isinstance(event, Sequence):
        return [step for part in event.parts for step in _steps_of(part)]
    if isinstance(event, GaussianMixture) and event.weights[0] > 0:
        records = len(event.shifts) - 1
        rate = -math.expm1(math.log(event.weights[0]) / records)
        binomial = GaussianMixture.of_sample(event.noise_multiplier, rate, records)
        is_sample = np.allclose(event.weights, binomial.weights, rtol=1e-9, atol=1e-12)
        if is_sample and event.shifts == binomial.shifts:
            return [_StepBill(rate, float("nan"), records)]
    return [_StepBill(None, _gradient_noise(event))]


def _gradient_noise(event: Event) -> float:
    """Return the noise multiplier of a step's gradient, which comes before adaptive counts."""
    return getattr(gaussian_of(event), "noise_multiplier", float("nan"))


def _bill(setup: TrainingSetup, noise: Releases, sigma: float, random: Rng) -> list[Finding]:
    """Compare what was charged with the price of what the run did."""
    run = noise.run
    used = sorted(public["noise_multiplier"] for public in noise.facts)
    tests: dict[str, bool] = {}
    least, event = _price(run.training_event, setup), run.training_event
    billed = [] if isinstance(event, BandedGaussian) else _steps_of(event)
    if isinstance(event, BandedGaussian):
        tests, measured = _banded_bill(setup, noise, event)
        least = max(least, _price(measured, setup))
    elif billed[0].rate is not None:
        given, records = setup.settings["batch_size"], _records_of(setup)
        rate = given / run.info["n_records"] if setup.sampler is None else given.rate
        noises = sorted(step.noise_multiplier for step in billed)
        rates = [step.rate or 0.0 for step in billed]
        tests["billed steps are the steps taken"] = len(billed) == len(used)
        tests["billed noise is the noise of each step"] = noises == used or records > 1
        tests["billed rate is batch size / records"] = np.allclose(rates, rate, rtol=1e-9, atol=0)
        tests["billed records are those of a user"] = {s.records for s in billed} == {records}
        sampled = [
            PoissonSampled(rate, _step_release(setup, multiplier, public))
            for multiplier, public in zip(used, noise.facts, strict=True)
        ]
        measured = [s if records == 1 else accounting.for_group(s, records) for s in sampled]
        least = max(least, _price(Sequence(tuple(measured)), setup))
    floor = least * (1 - _SLACK)
    paid, price = of_first_rank((run.ledger.event, run.ledger.epsilon(delta=SIMULATED_DELTA)))
    tests["the ledger was charged the price"] = _price(paid, setup) >= floor
    tests["the stated epsilon is the price"] = run.epsilon(delta=_DELTA) >= floor
    tests["a run beyond its budget is refused"] = _is_refused(setup, sigma, least)
    found = checks("bill", tests)
    stated = min(run.epsilon(delta=SIMULATED_DELTA), price)
    simulated = event.equivalent if isinstance(event, BandedGaussian) else event
    is_simulated = run.ledger.relation == Relation.ADD_REMOVE
    return found + (price_findings(simulated, stated, random, part="bill") if is_simulated else [])


def _records_of(setup: TrainingSetup) -> int:
    """Return how many records of a user may be in one lot, each clipped by itself."""
    users = setup.settings.get("users")
    is_by_record = getattr(users, "sampled", "users") == "records"
    return users.records_per_user if is_by_record else 1  # type: ignore[union-attr]  # has `sampled`


def _banded_bill(
    setup: TrainingSetup, noise: Releases, event: BandedGaussian
) -> tuple[dict[str, bool], Event]:
    """Return tests of the bill of a run with correlated noise, and the event that it should be.

    What one record adds to all releases is the norm of the column, for each turn of its group.
    """
    facts, bands = noise.facts, noise.facts[0].get("bands", 1)
    used = {public["noise_multiplier"] for public in facts}
    tests = {
        "billed steps are the steps taken": event.steps == len(facts),
        "billed noise is the noise of each step": used == {event.noise_multiplier},
        "billed bands are those of the noise": len(event.column) == bands,
    }
    least, norm = min(used), float(np.linalg.norm(event.column))
    if setup.sampler is not None:
        return tests, event
    rate = min(1.0, bands * setup.settings["batch_size"] / facts[0]["n_records"])
    tests["billed rate is bands * batch size / records"] = event.rate == rate
    turn = PoissonSampled(rate, Gaussian(least / norm * (1 - 1e-9)))
    return tests, Repeated(turn, -(-len(facts) // bands))


def _step_release(setup: TrainingSetup, multiplier: float, public: Public) -> Event:
    """Return the event of what one step releases of its lot: a gradient, and perhaps counts."""
    rule, gradient = setup.adaptive, Gaussian(multiplier)
    if rule is None:
        return gradient
    std, groups = rule.noise_std(public["expected_batch"]), len(public["clip_norms"])
    return Sequence((gradient, Gaussian(std / (_COUNT_MOVE * groups**0.5))))


def _price(event: Event, setup: TrainingSetup) -> float:
    return accounting.epsilon(event, delta=_DELTA, relation=setup.new_ledger().relation)


def _is_refused(setup: TrainingSetup, sigma: float, price: float) -> bool:
    """Return whether a run that costs more than its ledger's budget releases nothing."""
    budget = Budget(epsilon=price / 10, delta=_DELTA)
    trainee, steps = setup.trainee(), _whole_epochs(setup, 64)
    changes = {"steps": steps, "noise_multiplier": sigma, "ledger": setup.new_ledger(budget)}
    try:
        run = setup.run(trainee, **changes)
        for _ in setup.steps_of(run, trainee, 1):
            pass
    except BudgetExceeded:
        return all(p.grad is None for p in trainee.parameters)
    return False


def _only_numbered(loss_fn: Loss, unpack: Callable[[Any], Any]) -> Loss:
    """Return a loss that is zero for records without a number."""

    def loss(model: Any, batch: Any) -> Any:
        records, which = unpack(batch)
        return loss_fn(model, records) * (which > 0)

    return loss


def _for_numbers(setup: TrainingSetup, unpack: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the settings that have to change if every record carries a number."""
    changed: dict[str, Any] = {}
    if (collate := setup.settings.get("collate_fn")) is not None:
        changed["collate_fn"] = _numbered_collate(collate)
    given: Any = setup.settings.get("augment")  # Any: a function, or `Views`
    if (augment := getattr(given, "transform", given)) is not None:

        def of_records(batch: Any) -> Any:  # Any: a batch whose records carry numbers
            return _repacked(augment(unpack(batch)[0]), unpack(batch)[1])

        changed["augment"] = (
            of_records if augment is given else replace(given, transform=of_records)
        )
    return changed


def _numbered_collate(collate: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    import torch

    def numbered(items: list[Any]) -> Any:
        return collate([record for record, _ in items]), torch.tensor([n for _, n in items])

    return numbered


def _repacked(records: Any, which: Any) -> Any:
    return (*records, which) if isinstance(records, tuple | list) else (records, which)

"""tacit audits itself: everything that releases something is attacked, and its bill must hold.

Each member runs its strongest simple attack many times, with and without one record, or on many
Dirac canaries at once. Two things are asked: the bill is not refuted (at 99.9 %, so the whole file
raises a false alarm in at most 3 of 100 runs), and the attack is not idle: the same attack on the
same code with far less noise does refute that bill.
"""

import functools
import inspect
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from _smooth_sensitivity import Sanitizer
from speed_options import with_speed

import tacit
from tacit import mechanisms, pate, regression, training
from tacit.auditing import GradientCanaries, flip_coins, refute_event
from tacit.events import Event
from tacit.experiments import features
from tacit.sampling import RandomAllocation


def few_or_many(few, many):
    """Trials of an attack: few in every run of the tests, many in the slow ones."""
    return [few, pytest.param(many, marks=pytest.mark.slow)]


POINTS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)


class Attack(NamedTuple):
    """What is billed, what came out, and which trials held the record."""

    bill: Event
    scores: np.ndarray
    is_member: np.ndarray

    def refutes(self, bill: Event) -> bool:
        found = refute_event(
            self.scores, self.is_member, bill, confidence=0.999, independent=True, epsilons=POINTS
        )
        return found.is_refuted


def assert_sound(attack, *, n=2000, loud):
    """`attack(is_member, rng, loudness)` holds its bill; at a greater loudness it does not."""
    rng = np.random.default_rng(0)
    honest = attack(flip_coins(n, rng), rng, 1.0)
    assert not honest.refutes(honest.bill)
    assert attack(flip_coins(n, rng), rng, loud).refutes(honest.bill)


# Mechanisms ----------------------------------------------------------------------------------

ADDITIVE = {
    "GaussianMechanism": lambda loud, n: mechanisms.GaussianMechanism(1 / loud, l2_sensitivity=1.0),
    "LaplaceMechanism": lambda loud, n: mechanisms.LaplaceMechanism(1 / loud, l1_sensitivity=1.0),
    "GridGaussianMechanism": lambda loud, n: mechanisms.GridGaussianMechanism(
        1 / loud, l2_sensitivity=1.0, dimension=n
    ),
    "DiscreteGaussianMechanism": lambda loud, n: mechanisms.DiscreteGaussianMechanism(
        1 / loud, l2_sensitivity=1.0
    ),
    "DiscreteLaplaceMechanism": lambda loud, n: mechanisms.DiscreteLaplaceMechanism(
        loud, l1_sensitivity=1.0
    ),
}
SELECTIONS = {
    "ExponentialMechanism": lambda loud: mechanisms.ExponentialMechanism(loud, sensitivity=1.0),
    "PermuteAndFlip": lambda loud: mechanisms.PermuteAndFlip(loud, sensitivity=1.0),
    "LaplaceNoisyMax": lambda loud: mechanisms.LaplaceNoisyMax(loud, sensitivity=1.0),
    "GaussianNoisyMax": lambda loud: mechanisms.GaussianNoisyMax(
        2**0.5 / loud, l2_sensitivity=2**0.5
    ),
}


@pytest.mark.parametrize("name", ADDITIVE)
def test_an_additive_mechanism_holds_its_bill(name):
    def attack(inside, rng, loud):
        # A canary to a coordinate: each moves the vector by 1.
        mechanism = ADDITIVE[name](loud, len(inside))
        return Attack(mechanism.event, mechanism.release(inside.astype(int), rng), inside)

    assert_sound(attack, loud=2.5)


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_selection_holds_its_bill(name):
    def attack(inside, rng, loud):
        mechanism = SELECTIONS[name](loud)
        picks = [mechanism.release([1.0, 0.0] if one else [0.0, 1.0], rng) for one in inside]
        return Attack(mechanism.event, 1.0 - np.array(picks), inside)

    assert_sound(attack, loud=6.0)


def test_every_mechanism_is_audited():
    public = {
        name
        for name in mechanisms.__all__
        if inspect.isclass(value := getattr(mechanisms, name)) and hasattr(value, "release")
    }
    assert public - {"Mechanism"} == {*ADDITIVE, *SELECTIONS}


# A tenth of the noise is missing ------------------------------------------------------------

MECHANISMS = {
    "GaussianMechanism": mechanisms.GaussianMechanism(1.5, l2_sensitivity=2.0),
    "LaplaceMechanism": mechanisms.LaplaceMechanism(1.5, l1_sensitivity=2.0),
    "GridGaussianMechanism": mechanisms.GridGaussianMechanism(
        1.5, l2_sensitivity=1.0, dimension=64
    ),
    "DiscreteGaussianMechanism": mechanisms.DiscreteGaussianMechanism(4.0, l2_sensitivity=1.0),
    "DiscreteLaplaceMechanism": mechanisms.DiscreteLaplaceMechanism(0.25, l1_sensitivity=1.0),
    "ExponentialMechanism": mechanisms.ExponentialMechanism(1.0, sensitivity=1.0),
    "PermuteAndFlip": mechanisms.PermuteAndFlip(1.0, sensitivity=1.0),
    "LaplaceNoisyMax": mechanisms.LaplaceNoisyMax(1.0, sensitivity=1.0),
    "GaussianNoisyMax": mechanisms.GaussianNoisyMax(1.5, l2_sensitivity=2**0.5),
}


def refuted(name, tries, monkeypatch):
    """How many of `tries` audits of a mechanism refute it when 10 % of its noise are missing."""
    mechanism = MECHANISMS[name]
    honest = type(mechanism).release
    field, factor = ("noise_multiplier", 0.9)
    if not hasattr(mechanism, field):
        field, factor = "epsilon", 1 / 0.9

    def short(self, value, rng=None):
        return honest(replace(self, **{field: getattr(self, field) * factor}), value, rng)

    monkeypatch.setattr(type(mechanism), "release", short)
    return sum(not tacit.auditing.audit_mechanism(mechanism, rng=k).passes for k in range(tries))


@pytest.mark.parametrize("name", ["GaussianMechanism", "LaplaceMechanism", "ExponentialMechanism"])
def test_a_tenth_less_noise_is_refuted(name, monkeypatch):
    assert refuted(name, 1, monkeypatch) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_tenth_less_noise_is_refuted_nine_times_in_ten(name, monkeypatch):
    assert refuted(name, 10, monkeypatch) >= 9


def test_every_mechanism_is_tried_with_less_noise():
    assert MECHANISMS.keys() == {*ADDITIVE, *SELECTIONS}


# DP-SGD --------------------------------------------------------------------------------------


def squared_error(model, batch):
    x, y = batch
    return (model(x).squeeze(1) - y) ** 2


def train(inside, rng, loud, **options: Any):
    """One audited run; `loud` divides its noise."""
    torch.manual_seed(0)
    canaries = GradientCanaries(len(inside), clip_norm=1.0, rng=rng)
    x = torch.randn(40, 3)
    model, data, loss_fn = canaries.plant(torch.nn.Linear(3, 1), (x, x.sum(1)), squared_error)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    n_records = 40 + len(inside) // 2
    private = tacit.make_private(
        model,
        optimizer,
        data,
        loss_fn,
        batch_size=n_records // 4,
        steps=8,
        noise_multiplier=1.0 / loud,
        n_records=n_records,
        seed=int(rng.integers(2**31)),
        **with_speed({"clip_norm": 1.0} | options),
    )
    for lot in canaries.watch(private):
        private.step(lot)
    return Attack(private.event, canaries.scores, canaries.is_member)


RUNS = {
    "as it is": {},
    "secure noise": {"secure": True},
    "small microbatches": {"max_microbatch": 7},
    "noise schedule": {"schedule": training.Ramp(1.0, 2.0)},
    "automatic clipping": {"clip_norm": training.Automatic(1.0)},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_training_run_holds_its_bill(name):
    n = 300 if name in ("secure noise", "small microbatches") else 1500

    def attack(inside, rng, loud):
        return train(inside, rng, loud, **RUNS[name])

    assert_sound(attack, n=n, loud=5.0)


def test_a_run_by_random_allocation_holds_its_bill():
    def attack(inside, rng, loud):
        return train(inside, rng, loud, batch_size=RandomAllocation(4))

    assert_sound(attack, n=1500, loud=5.0)


def test_adaptive_clipping_holds_its_bill():
    def attack(inside, rng, loud):
        return train(inside, rng, loud, clip_norm=training.AdaptiveClip(1.0))

    assert_sound(attack, n=1500, loud=5.0)


# Regression ----------------------------------------------------------------------------------

BOXES = {"bounds": (-1.0, 1.0), "epsilon": 1.0, "n_records": 5, "delta": 1e-3}
TARGET = {"target_bounds": (-1.0, 1.0)}
ESTIMATORS = {
    "functional": (
        "LinearRegression",
        TARGET | {"method": "functional", "delta": 0.0, "n_records": None},
    ),
    "adassp": ("LinearRegression", TARGET | {"method": "adassp"}),
    "gradient": ("LinearRegression", TARGET | {"method": "gradient"}),
    "logistic gradient": ("LogisticRegression", {"classes": (0, 1)}),
    "objective": ("LogisticRegression", {"classes": (0, 1), "method": "objective"}),
    "transfer": ("TransferRegression", TARGET),
    # The canary turns the choice between the two vertices round.
    "Frank-Wolfe": ("FrankWolfe", TARGET | {"vertices": [[1.0], [-0.2]], "steps": 1}),
}


def modules_with(start):
    """Modules of the regressions, each with a name of theirs that begins so."""
    loaded = [module for name, module in sys.modules.items() if name.startswith("tacit.regression")]
    return [(module, name) for module in loaded for name in vars(module) if name.startswith(start)]


@pytest.fixture
def plan_once(monkeypatch):
    """The plan of a fit depends on public facts only: made once, not for every trial."""
    for estimator, _ in ESTIMATORS.values():
        getattr(regression, estimator)  # loads its module
    for module, name in modules_with("plan_"):
        monkeypatch.setattr(module, name, functools.cache(getattr(module, name)))


def silence(monkeypatch, loud):
    """A fault in the mechanisms: everything is planned and billed as before, with less noise."""
    for kind in (mechanisms.GaussianMechanism, mechanisms.LaplaceMechanism):
        honest = kind.release

        def release(self, value, rng=None, honest=honest):
            return honest(replace(self, noise_multiplier=self.noise_multiplier / loud), value, rng)

        monkeypatch.setattr(kind, "release", release)
    for kind in (mechanisms.ExponentialMechanism, mechanisms.PermuteAndFlip):
        honest = kind.release

        def choose(self, scores, rng=None, honest=honest):
            return honest(replace(self, epsilon=self.epsilon * loud), scores, rng)

        monkeypatch.setattr(kind, "release", choose)
    for module, name in modules_with("plan_objective"):  # draws its noise by itself
        plan = getattr(module, name)
        quiet = lambda *args, plan=plan, **facts: replace(plan(*args, **facts), noise_std=1e-3)  # noqa: E731
        monkeypatch.setattr(module, name, quiet)


@pytest.mark.usefixtures("plan_once")
@pytest.mark.parametrize("n", few_or_many(80, 250))
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_regression_holds_its_bill(name, n, monkeypatch):
    estimator, settings = ESTIMATORS[name]
    make = getattr(regression, estimator)
    x, y = np.array([[-0.1], [0.1], [-0.1], [0.1], [1.0]]), np.array([0, 0, 1, 1, 1])

    def attack(inside, rng, loud):
        if loud > 1:
            silence(monkeypatch, loud)
        scores, event = [], None
        for one in inside:
            options = BOXES | settings | {"random_state": int(rng.integers(2**31))}
            model = make(**{k: v for k, v in options.items() if k in _parameters(make)})
            # The canary, at the end, pulls as hard as the bounds allow; the others cancel out.
            model.fit(x[: 4 + one], y[: 4 + one])
            scores.append(float(model.coef_.sum() + np.sum(model.intercept_)))
            event = model.event_
        assert event is not None
        return Attack(event, np.array(scores), inside)

    assert_sound(attack, n=n, loud=1000.0)


def _parameters(make):
    return inspect.signature(make.__init__).parameters


def test_every_regression_is_audited():
    # `PerUser` fits another estimator to a few records of each user, and has tests of its own.
    others = {"Bounds", "ConstantModel", "Inference", "PerUser", "SecondMoments"}
    functions = {"fit_for_users", "planned_event"}
    estimators = set(regression.__all__) - others - functions
    assert estimators == {name for name, _ in ESTIMATORS.values()}


# PATE ----------------------------------------------------------------------------------------

AGGREGATORS = {
    "LaplaceMax": lambda loud: pate.LaplaceMax(1.0 / loud),
    "GNMax": lambda loud: pate.GNMax(1.0 / loud),
    "ConfidentGNMax": lambda loud: pate.ConfidentGNMax(
        threshold=25.5, sigma_threshold=1.0 / loud, sigma_answer=5.0
    ),
}


@pytest.mark.parametrize("name", AGGREGATORS)
def test_an_aggregator_holds_its_bill(name):
    def attack(inside, rng, loud):
        aggregator = AGGREGATORS[name](loud)
        has_check = hasattr(aggregator, "threshold")
        lead = inside + (25 if has_check else 24)  # one vote moves; 49 teachers
        votes = np.column_stack([lead, 49 - lead])
        labels = aggregator.answer(votes, rng=rng, block=len(votes))
        scores = labels != pate.NO_ANSWER if has_check else labels == 0
        return Attack(aggregator.event(1), scores.astype(float), inside)

    assert_sound(attack, loud=5.0)


def test_every_aggregator_is_audited():
    public = {name for name in pate.__all__ if hasattr(getattr(pate, name), "answer")}
    assert public - {"Aggregator"} == set(AGGREGATORS)


@pytest.mark.parametrize("n", few_or_many(60, 300))
def test_a_published_cost_holds_its_bill(n):
    def attack(inside, rng, loud):
        sanitizer = Sanitizer(beta=0.02, noise_multiplier=2.0 / loud, margin=0.0)
        both = [[[70, 30]], [[71, 29]]]
        costs = [sanitizer.release(both[one], sigma=5.0, rng=rng) for one in inside.astype(int)]
        return Attack(sanitizer.event, -np.array(costs), inside)

    assert_sound(attack, n=n, loud=20.0)


# Features ------------------------------------------------------------------------------------

SUMMARIES = {
    "PrivateMean": lambda loud: features.PrivateMean(1, 1.0 / loud),
    "PrivatePCA": lambda loud: features.PrivatePCA(1, 1.0 / loud),
    "PrivateEvening": lambda loud: features.PrivateEvening(2, 1.0 / loud),
}
STATISTICS = {
    "PrivateMean": np.sum,
    "PrivatePCA": lambda directions: abs(directions[0, 0]),
    "PrivateEvening": lambda shortened: -shortened[0, 0],
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_summary_of_features_holds_its_bill(name):
    def attack(inside, rng, loud):
        summary = SUMMARIES[name](loud)
        # A record longer than may be, or nothing; what is evened must stand out before.
        record = np.array([[1e3, 1e3 if name == "PrivateMean" else 0.0]])
        others = np.repeat(record, 10, axis=0) if name == "PrivateEvening" else 0 * record
        both = [others, np.concatenate([others, record])]
        released = [summary.release(both[one], rng) for one in inside.astype(int)]
        scores = np.array([float(STATISTICS[name](value)) for value in released])
        return Attack(summary.event, scores, inside)

    assert_sound(attack, n=600, loud=20.0)


def test_every_summary_is_audited():
    names = (name for name in vars(features) if not name.startswith("_"))
    public = {name for name in names if hasattr(getattr(features, name), "release")}
    assert public - {"PaidSummary", "GaussianMechanism"} == set(SUMMARIES)

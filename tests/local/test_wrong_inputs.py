"""Inputs that no person or server should send: refused or handled, and never quoted if private."""

import traceback

import numpy as np
import pytest

from tacit import local
from tacit.local import ORACLES
from tacit.mechanisms import secure_generator

NUMBERS = [
    local.DuchiMean(epsilon=1.0),
    local.PiecewiseMean(epsilon=1.0),
    local.HybridMean(epsilon=1.0),
    local.SampledVector(epsilon=1.0, n_dimensions=1),
    local.LocalHistogram(epsilon=1.0, lower=-1.0, upper=1.0, n_bins=3),
    local.LocalQuantiles(epsilon=1.0, lower=-1.0, upper=1.0, depth=2),
]
OPTIONS = [kind(epsilon=1.0, n_options=70) for kind in ORACLES]
LABELS = [local.RandomizedLabels(epsilon=1.0, n_classes=5), local.Rappor(n_options=5)]


def name(randomizer) -> str:
    return type(randomizer).__name__


@pytest.mark.parametrize("randomizer", NUMBERS + OPTIONS + LABELS, ids=name)
@pytest.mark.parametrize("value", ["sesame", ["sesame", "open"], [["sesame"], 1], [10**400], {}])
def test_private_values_are_not_quoted_in_errors(randomizer, value):
    with pytest.raises((TypeError, ValueError)) as caught:
        randomizer.randomize(value)
    text = "".join(traceback.format_exception(caught.value)[-1:])
    assert "sesame" not in text
    assert "U6" not in text  # the type of a text contains its length
    assert caught.value.__context__ is None or "sesame" not in str(caught.value.__context__)


@pytest.mark.parametrize("randomizer", OPTIONS + LABELS, ids=name)
@pytest.mark.parametrize("value", [987654, -987654, np.array([1, 987654])])
def test_options_outside_are_refused_without_being_quoted(randomizer, value):
    with pytest.raises(ValueError, match="must be whole numbers from 0") as caught:
        randomizer.randomize(value)
    assert "987654" not in str(caught.value)


def test_gradients_do_not_quote_the_data():
    sgd = local.LocalSGD(epsilon=1.0, n_features=1)
    for X, y in ([["sesame"]], [1.0]), ([[1.0]], ["sesame"]):
        with pytest.raises(TypeError, match="must be numbers") as caught:
            sgd.fit(X, y)
        assert "sesame" not in str(caught.value)
        assert caught.value.__context__ is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("randomizer", NUMBERS, ids=name)
def test_infinite_and_missing_numbers_count_as_declared(randomizer):
    shape = (4, 1) if hasattr(randomizer, "n_dimensions") else (4,)
    values = np.array([np.inf, -np.inf, np.nan, 1e308]).reshape(shape)
    reports = randomizer.randomize(values, rng=secure_generator())
    if not isinstance(randomizer, local.LocalQuantiles):
        assert len(reports) == 4
        assert np.isfinite(np.asarray(reports, dtype=np.float64)).all()


@pytest.mark.parametrize("oracle", OPTIONS, ids=name)
def test_nobody_sends_no_report(oracle):
    reports = oracle.randomize(np.array([], dtype=np.int64))
    assert reports.shape == (0, *oracle.randomize(1).shape)


@pytest.mark.parametrize("oracle", OPTIONS, ids=name)
@pytest.mark.parametrize("planted", [-1, 10**6, 1.5, "shape", "flat"])
def test_reports_that_no_client_sends_are_refused(oracle, planted):
    reports = oracle.randomize([1, 2, 3]).tolist()
    if planted == "shape":
        reports = np.array(reports).reshape(3, -1)
        reports = np.concatenate([reports, reports, reports], axis=1)
    elif planted == "flat":
        reports = reports[0]  # one report in place of a list of them
    elif isinstance(reports[0], list):
        reports[0][-1] = planted
    else:
        reports[0] = planted
    with pytest.raises((TypeError, ValueError), match="reports must"):
        oracle.estimate(reports)


@pytest.mark.parametrize("epsilon", [1e-300, 1e-16, 30.1, np.inf, np.nan, 0.0, -1.0])
@pytest.mark.parametrize("kind", ORACLES, ids=lambda kind: kind.__name__)
def test_epsilons_that_coins_cannot_express_are_refused(kind, epsilon):
    with pytest.raises(ValueError, match="epsilon must be"):
        kind(epsilon=epsilon, n_options=3)


@pytest.mark.parametrize("epsilon", [1e-9, 1e-4, 12.0, 20.0, 30.0])
@pytest.mark.parametrize("n_options", [2, 1000])
@pytest.mark.parametrize("kind", ORACLES, ids=lambda kind: kind.__name__)
def test_extreme_epsilons_are_private_and_can_be_estimated(kind, n_options, epsilon, enumeration):
    oracle = kind(epsilon=epsilon, n_options=n_options)
    ratio = oracle.worst_case_ratio()
    assert 1 < ratio <= enumeration.exponential(epsilon)
    found = oracle.estimate(oracle.randomize([1, 1, 0], rng=secure_generator()))
    assert np.isfinite(found.values).all()


def test_parts_of_a_vector_never_exceed_epsilon(enumeration):
    for epsilon in np.random.default_rng(0).uniform(5, 30, 300):
        for d in (2, 3, 7):
            vector = local.SampledVector(epsilon=epsilon, n_dimensions=d)
            assert vector.worst_case_ratio() <= enumeration.exponential(float(epsilon))


def test_bounds_too_far_apart_are_refused():
    with pytest.raises(ValueError, match="lower must be below upper"):
        local.HybridMean(epsilon=1.0, lower=-1.7e308, upper=1.7e308)


def test_quantiles_of_too_few_persons_are_refused():
    quantiles = local.LocalQuantiles(epsilon=1.0, lower=0.0, upper=1.0)
    with pytest.raises(ValueError, match="each level needs"):
        quantiles.estimate(quantiles.randomize([0.1, 0.2], rng=0), [0.5])

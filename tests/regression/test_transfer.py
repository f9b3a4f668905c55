"""Transfer: sensitivities, choice of sources, and errors close to those of the target alone."""

import numpy as np
import pandas as pd
import pytest

import tacit
from tacit.accounting import GDP
from tacit.errors import BudgetExceeded
from tacit.events import Relation, Sequence
from tacit.mechanisms import GaussianMechanism
from tacit.regression import Bounds, LinearRegression, TransferRegression, transfer
from tacit.regression.rows import PrivateRows

OPTIONS = {"bounds": Bounds(0, 10), "target_bounds": Bounds(-40, 60)}


def people(rows, low=0.0, high=10.0, slope=(2.0, 1.0), seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(low, high, (rows, 2))
    return X, X @ slope + 1 + rng.normal(0, 1, rows)


def fitted(sources, seed=0, **changes):
    model = TransferRegression(**OPTIONS | {"random_state": seed} | changes)
    return model.fit(*people(2000, 0, 3, seed=90), sources=sources)


def test_sources_on_the_same_line_are_used_and_sources_on_another_are_not():
    same = [people(5000, 3, 10, seed=k) for k in (1, 2)]
    other = [people(5000, 3, 10, slope=(-2.0, 3.0), seed=k) for k in (3, 4)]
    model = fitted([same[0], other[0], same[1], other[1]])
    assert model.informative_ == [0, 2]


@pytest.mark.parametrize("q", [1, 2])
def test_informative_sources_lower_the_error(q):
    test, truth = people(500, seed=7)[0], np.array([2.0, 1.0])

    def error(sources):
        losses = []
        for seed in range(5):
            model = fitted(sources, seed, q=q)
            losses.append(np.mean((model.predict(test) - test @ truth - 1) ** 2))
        return np.median(losses)

    good = [people(5000, seed=k) for k in (1, 2, 3)]
    assert error(good) < 0.5 * error([])


def test_no_single_run_is_far_off_where_the_noise_of_one_source_hides_directions():
    """Two equal columns: the fits differ by much in what no record shows. All runs count.

    One source whose Gram matrix has noise must not move the target by what this noise seems to say.
    """

    def around(middle, rng):
        t = middle + rng.uniform(-0.5, 0.5, 400)
        return np.column_stack([t, t]), 2 * t + 1 + rng.normal(0, 0.5, 400)

    points = np.arange(1.0, 9.0)
    errors = []
    for seed in range(49, 79):
        rng = np.random.default_rng(seed)
        model = TransferRegression(
            epsilon=5.0, h=0.0, bounds=(0, 9), target_bounds=(1, 19), random_state=seed
        ).fit(*around(1, rng), sources=[around(2, rng)])
        alone = points[:, None] * model.alone_[0].sum() + model.alone_[1]
        found = model.predict(np.column_stack([points, points]))
        errors.append([np.sum((p.ravel() - 2 * points - 1) ** 2) for p in (found, alone)])
    helped, alone = np.array(errors).T
    assert helped.mean() < 0.5 * alone.mean()
    assert helped.max() < alone.max()


@pytest.mark.parametrize("q", [1, 2])
def test_bad_sources_leave_the_target_its_own_fit(q):
    bad = [people(20_000, slope=(-3.0, 0.0), seed=k) for k in (1, 2)]
    with_them, alone = fitted(bad, q=q), fitted([], q=q)
    assert with_them.informative_ == []
    np.testing.assert_allclose(with_them.coef_, alone.coef_)


@pytest.mark.slow
@pytest.mark.parametrize("q", [1, 2])
@pytest.mark.parametrize(("offset", "most"), [(0.3, 1.1), (0.45, 1.2), (0.6, 1.1), (3.0, 1.0)])
def test_sources_of_another_line_cost_little_and_plain_ones_nothing(offset, most, q):
    """Mean error over fixed seeds; the worst offset, 0.45, is the largest that noise can hide."""
    errors = np.zeros((100, 2))
    test = people(300, seed=7)[0]
    for seed in range(len(errors)):
        turn = np.random.default_rng(seed).normal(size=2)
        slope = np.array([2.0, 1.0]) + offset * turn / np.linalg.norm(turn)
        target = people(2000, seed=1000 + seed)
        bad = [people(5000, slope=slope, seed=2000 + 10 * seed + k) for k in range(3)]
        for column, sources in enumerate([bad, []]):
            model = TransferRegression(**OPTIONS, q=q, random_state=seed)
            away = model.fit(*target, sources=sources).predict(test) - test @ [2.0, 1.0] - 1
            errors[seed, column] = np.mean(away**2)
    helped, alone = errors.mean(axis=0)
    assert helped <= most * alone


def test_what_the_target_releases_does_not_depend_on_unlike_sources():
    """There is screening; the features and the noise are those of the target without sources."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (20_000, 60))
    target, other = (X, X[:, 7] - X[:, 21]), (X[::-1], X[::-1, 40] - X[::-1, 50])
    options = {"bounds": (-1, 1), "target_bounds": (-2, 2), "max_features": 6, "random_state": 0}
    alone = TransferRegression(epsilon=2.0, **options).fit(*target)
    beside = TransferRegression(epsilon=2.0, **options).fit(*target, sources=[other, other])
    assert beside.informative_ == []
    np.testing.assert_array_equal(beside.coef_, alone.coef_)


def test_a_wide_allowance_lets_a_distant_source_in():
    near = [people(5000, slope=(2.3, 1.0), seed=1)]
    assert fitted(near, epsilon=20.0, h=0.0).informative_ == []
    assert fitted(near, epsilon=20.0, h=3.0).informative_ == [0]


def test_the_target_alone_is_the_fit_of_linear_regression_and_spends_the_same():
    target = people(2000, 0, 3, seed=90)
    options = OPTIONS | {"delta": 1e-6, "random_state": 5}
    alone = LinearRegression(**options).fit(*target)
    helped = TransferRegression(**options).fit(*target, sources=[people(3000, seed=1)])
    np.testing.assert_array_equal(helped.alone_[0], alone.coef_)
    assert helped.alone_[1] == alone.intercept_
    assert helped.events_[0] == alone.event_
    assert 0 < helped.weight_ <= 1
    unlike = TransferRegression(**options).fit(*target, sources=[people(3000, slope=(-3.0, 0.0))])
    assert (unlike.weight_, unlike.misfits_[0] > 1) == (0.0, True)
    np.testing.assert_array_equal(unlike.coef_, alone.coef_)


def test_the_screen_moves_by_no_more_than_claimed(monkeypatch):
    box = Bounds(0, 100).box(30)
    budget = {"epsilon": 1.0, "delta": 1e-6, "relation": Relation.ADD_REMOVE}
    plan = transfer.plan_data_set(box, n_kept=9, n_records=100, **budget)
    assert GDP().epsilon(plan.event, delta=1e-6) <= 1.0
    released = []
    monkeypatch.setattr(
        GaussianMechanism, "release", lambda _, value, rng: released.append(value) or value
    )
    rng = np.random.default_rng(0)
    for _ in range(50):
        X, y = rng.uniform(-50, 150, (1, 30)), rng.choice([-1.0, 1.0], 1)
        rows = PrivateRows(X, box, row_norm=plan.screen.l2_sensitivity)
        transfer.release_screen(rows, y, plan.screen, rng)
        assert np.linalg.norm(released[-1]) <= plan.screen.l2_sensitivity * (1 + 1e-9)


@pytest.mark.parametrize("q", [1, 2])
def test_a_large_penalty_takes_the_model_of_all_and_none_that_of_the_target(q):
    near = [people(20_000, slope=(2.15, 1.0), seed=1)]
    free, strict = (fitted(near, epsilon=3.0, q=q, h=5.0, penalty=p) for p in (0.0, 1e6))
    alone = fitted([], epsilon=3.0)
    np.testing.assert_allclose(free.coef_, alone.coef_, atol=1e-6)
    assert np.abs(strict.coef_ - alone.coef_).max() > 10 * np.abs(free.coef_ - alone.coef_).max()


def test_many_features_are_screened_first():
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (20_000, 60))
    y = X[:, 7] - X[:, 21]
    model = TransferRegression(
        epsilon=2.0, bounds=(-1, 1), target_bounds=(-2, 2), max_features=6, random_state=0
    ).fit(X, y, sources=[(X[::-1], y[::-1])])
    assert np.count_nonzero(model.coef_) <= 6
    assert {7, 21} <= set(np.flatnonzero(np.abs(model.coef_) > 0.5).tolist())
    assert GDP().epsilon(model.event_, delta=1e-6) <= 2.0


def test_disjoint_people_cost_the_maximum_and_shared_people_the_sum():
    sources = [people(1000, seed=1), people(1000, seed=2)]
    apart = fitted(sources, source_epsilon=[0.5, 2.0])
    assert GDP().epsilon(apart.event_, delta=1e-6) == pytest.approx(2.0, rel=1e-6)
    together = fitted(sources, disjoint=False)
    assert together.event_ == Sequence(together.events_)
    assert GDP().epsilon(together.event_, delta=1e-6) > 1.5


def test_one_ledger_pays_disjoint_people_in_parallel_and_shared_ones_in_sequence():
    sources = [people(1000, seed=1), people(1000, seed=2)]

    def spent(disjoint):
        ledger = tacit.Ledger()
        fitted(sources, disjoint=disjoint, ledger=ledger)
        assert len(ledger.history()) == 3
        return ledger.epsilon(delta=1e-6)

    assert spent(disjoint=False) > 1.5 * spent(disjoint=True)


def test_one_ledger_covers_people_whose_source_changes_place():
    """Partitions are named by position: people of the costly source, used twice, must pay twice."""
    ledger = tacit.Ledger()
    costly, cheap = people(1000, seed=1), people(1000, seed=2)
    options = {"epsilon": 0.1, "ledger": ledger}
    once = fitted([costly, cheap], source_epsilon=[1.0, 0.1], **options).events_[1]
    fitted([cheap, costly], source_epsilon=[0.1, 1.0], **options)
    met = GDP().epsilon(Sequence((once, once)), delta=1e-6)
    assert ledger.epsilon(delta=1e-6) >= met * (1 - 1e-9)


def test_a_source_with_other_columns_is_refused():
    def frame(X, names):
        return pd.DataFrame(X, columns=list(names))

    (X, y), (more, labels) = people(100), people(100, seed=1)
    model = TransferRegression(**OPTIONS)
    model.fit(frame(X, "ab"), y, sources=[(frame(more, "ab"), labels)])
    with pytest.raises(ValueError, match="source 0 must have the columns of the target"):
        model.fit(frame(X, "ab"), y, sources=[(frame(more, "ba"), labels)])


def test_sources_may_pay_from_ledgers_of_their_own():
    ledgers = [tacit.Ledger() for _ in range(3)]
    model = TransferRegression(**OPTIONS, ledger=ledgers[0])
    sources = [people(500, seed=1), people(500, seed=2)]
    model.fit(*people(500), sources=sources, source_ledgers=ledgers[1:])
    assert [len(ledger.history()) for ledger in ledgers] == [1, 1, 1]
    poor = tacit.Ledger(budget=tacit.Budget(epsilon=0.01, delta=1e-9))
    with pytest.raises(BudgetExceeded):
        TransferRegression(**OPTIONS).fit(
            *people(500), sources=sources, source_ledgers=[None, poor]
        )


@pytest.mark.parametrize(
    ("sources", "changes", "message"),
    [
        ([people(100)[0]], {}, "source 0 must be a pair"),
        ([(np.full((5, 2), np.nan), np.zeros(5))], {}, "source 0 must be a pair"),
        ([(np.zeros((5, 3)), np.zeros(5))], {}, "must have the 2 features"),
        ([people(100)], {"q": 3}, "q must be 1 or 2"),
        ([people(100)], {"h": -1.0}, "h must be"),
        ([people(100)], {"penalty": -1.0}, "penalty must be"),
        ([people(100)], {"n_records": [2000]}, "one per data set: got 1"),
        ([people(100)], {"n_records": [2000, 0]}, "n_records must be"),
        ([people(100)], {"source_epsilon": [1.0, 1.0]}, "source_epsilon must be one number"),
        ([people(100)], {"delta": 0.0}, "delta must be in"),
    ],
)
def test_a_fault_is_an_error_and_costs_nothing(sources, changes, message):
    ledger = tacit.Ledger()
    with pytest.raises(ValueError, match=message):
        fitted(sources, ledger=ledger, **changes)
    assert ledger.history() == []


def test_records_without_a_target_do_no_harm_if_their_number_is_declared():
    """A fifth of all records is left out, of the target and of its source."""
    declared = TransferRegression(**OPTIONS, n_records=10_000, epsilon=3.0, random_state=0)
    declared.fit(*people(8000, seed=1), sources=[people(8000, seed=2)])
    assert declared.informative_ == [0]
    np.testing.assert_allclose(declared.coef_, [2.0, 1.0], rtol=0.02)
    assert declared.intercept_ == pytest.approx(1.0, abs=0.1)

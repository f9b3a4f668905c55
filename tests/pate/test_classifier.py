"""PATE in one call: what comes out, what is paid, what is refused, and life after a kill."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB

from tacit import Budget, Ledger
from tacit.errors import BudgetExceeded, LedgerError
from tacit.mechanisms import GaussianMechanism
from tacit.pate import (
    NO_ANSWER,
    ConfidentGNMax,
    GNMax,
    Journal,
    OverlapWarning,
    PATEClassifier,
    TeacherError,
)


def blobs(n, seed=0, n_classes=3):
    rng = np.random.default_rng(1000 + seed)  # no seed that a partition uses
    y = rng.integers(0, n_classes, n)
    return rng.normal(size=(n, 4)) + 5 * np.eye(n_classes, 4)[y], y


X, Y = blobs(800)
PUBLIC, _ = blobs(200, seed=1)
TEST, TRUTH = blobs(200, seed=2)


def small(**options):
    defaults = {"n_teachers": 20, "n_queries": 30, "aggregator": GNMax(3.0), "rng": 0}
    return PATEClassifier(GaussianNB(), **(defaults | options))


def test_a_student_learns_from_noisy_votes():
    model = small().fit(X, Y, PUBLIC)
    assert model.score(TEST, TRUTH) > 0.95
    assert model.event_ == GNMax(3.0).event(30)
    assert model.ledger_.epsilon(delta=1e-5) > 0


def test_labels_may_have_any_names():
    names = np.array(["cat", "dog", "eel"])
    model = small().fit(X, names[Y], PUBLIC)
    assert np.mean(model.predict(TEST) == names[TRUTH]) > 0.95


def test_a_student_of_the_users_choice_sees_only_labeled_inputs_if_asked():
    model = small(student=LogisticRegression(), use_unlabeled=False, n_queries=100).fit(
        X, Y, PUBLIC
    )
    assert isinstance(model.student_, LogisticRegression)
    assert model.score(TEST, TRUTH) > 0.9


def test_nothing_private_is_kept():
    model = small().fit(X, Y, PUBLIC)
    kept = {name for name in vars(model) if name.endswith("_")}
    assert kept == {
        "classes_",
        "ledger_",
        "queries_",
        "labels_",
        "event_",
        "student_",
    }


def test_the_budget_is_kept():
    ledger = Ledger(budget=Budget(epsilon=4.0, delta=1e-5))
    model = small(ledger=ledger, n_queries=200).fit(X, Y, PUBLIC)
    assert 0 < model.n_answered_ < 200
    assert ledger.epsilon(delta=1e-5) <= 4.0


def test_a_budget_too_small_for_anything_raises():
    ledger = Ledger(budget=Budget(epsilon=0.001, delta=1e-9))
    with pytest.raises(BudgetExceeded):
        small(ledger=ledger).fit(X, Y, PUBLIC)
    assert list(ledger.history()) == []


def test_no_answer_at_all_is_a_clear_error():
    aggregator = ConfidentGNMax(threshold=100, sigma_threshold=1.0, sigma_answer=3.0)
    with pytest.raises(ValueError, match="no query was answered"):
        small(aggregator=aggregator).fit(X, Y, PUBLIC)


def test_a_failing_teacher_is_named_and_nothing_is_spent():
    class Failing(GaussianNB):
        def fit(self, X, y):
            raise ArithmeticError

    ledger = Ledger()
    model = PATEClassifier(Failing(), n_teachers=5, n_queries=5, ledger=ledger)
    with pytest.raises(TeacherError, match="teacher 0 of 5"):
        model.fit(X, Y, PUBLIC)
    assert list(ledger.history()) == []


def test_records_may_come_in_tables():
    table = pytest.importorskip("pandas").DataFrame
    model = small().fit(table(X, index=np.arange(len(X)) + 7), Y, table(PUBLIC))
    assert model.labels_.tolist() == small().fit(X, Y, PUBLIC).labels_.tolist()


def nan_at(array):
    array = array.copy()
    array[0, 0] = np.nan
    return array


@pytest.mark.parametrize(
    ("X_", "y", "public", "options", "match"),
    [
        (X[:10], Y[:10], PUBLIC, {}, "fewer teachers"),
        (nan_at(X), Y, PUBLIC, {}, "X must be finite"),
        (X, Y, nan_at(PUBLIC), {}, "X_public must be finite"),
        (X, Y[:5], PUBLIC, {}, "one class for each record"),
        (X, Y, PUBLIC[:, :2], {}, "X_public must have inputs of the shape"),
        (X, Y, PUBLIC[:10], {}, "n_queries must be <="),
        (X, Y, PUBLIC, {"classes": [0, 1]}, "declared classes"),
        (X, np.zeros_like(Y), PUBLIC, {}, "classes must be at least 2"),
        (X, Y, PUBLIC, {"queries": "worst"}, "queries must be"),
    ],
    ids=["few", "nan", "nan public", "y", "shape", "queries", "class", "one", "which"],
)
def test_wrong_input_is_refused_before_anything_is_spent(X_, y, public, options, match):
    ledger = Ledger()
    with pytest.raises(ValueError, match=match):
        small(ledger=ledger, **options).fit(X_, y, public)
    assert list(ledger.history()) == []


def test_a_declared_class_without_records_is_no_trouble():
    model = small(classes=[0, 1, 2, 3]).fit(X, Y, PUBLIC)
    assert model.classes_.tolist() == [0, 1, 2, 3]
    assert model.score(TEST, TRUTH) > 0.95


def test_public_inputs_that_are_private_give_a_warning_without_numbers():
    shared = np.vstack([PUBLIC, X[:3]])
    with pytest.warns(OverlapWarning, match="identical to private") as caught:
        small().fit(X, Y, shared)
    assert not any(digit in str(caught[0].message) for digit in "0123456789")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small().fit(X, Y, PUBLIC)


def test_settings_are_scikit_learns():
    ledger = Ledger()
    model = small(ledger=ledger)
    assert clone(model).ledger is ledger
    assert clone(model).set_params(n_teachers=7).n_teachers == 7
    with pytest.raises(ValueError, match="no setting"):
        model.set_params(color="red")


def test_the_plan_prices_every_query_answered():
    aggregator = ConfidentGNMax(threshold=15, sigma_threshold=4.0, sigma_answer=3.0)
    assert small(aggregator=aggregator).plan_event(200) == aggregator.event(30, 30)
    capped = small(aggregator=aggregator, max_answers=7)
    assert capped.plan_event(200) == aggregator.event(30, 7)
    assert capped.fit(X, Y, PUBLIC).n_answered_ <= 7


KILLED = """
    import os, signal
    import numpy as np
    from sklearn.naive_bayes import GaussianNB
    from tacit import Ledger
    from tacit.pate import GNMax, Journal, PATEClassifier

    def blobs(n, seed):
        rng = np.random.default_rng(1000 + seed)
        y = rng.integers(0, 3, n)
        return rng.normal(size=(n, 4)) + 5 * np.eye(3, 4)[y], y

    X, y = blobs(800, 0)
    public, _ = blobs(200, 1)
    {fault}
    PATEClassifier(
        GaussianNB(), n_teachers=20, n_queries=30, aggregator=GNMax(3.0), max_answers=30,
        ledger=Ledger("{folder}/run.ledger"), folder="{folder}",
    ).fit(X, y, public)
"""
AFTER_ANSWER_12 = """
    record = Journal.record
    def killed(self, queries, labels):
        record(self, queries, labels)
        if len(self) == 12:
            os.kill(os.getpid(), signal.SIGKILL)
    Journal.record = killed
"""
BETWEEN_PAYING_AND_ANSWERING_12 = """
    record = Journal.record
    def killed(self, queries, labels):
        if len(self) == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        record(self, queries, labels)
    Journal.record = killed
"""


@pytest.mark.skipif(os.name == "nt", reason="kills a process by a POSIX signal")
@pytest.mark.parametrize(
    ("fault", "answered", "paid"),
    [
        pytest.param(AFTER_ANSWER_12, 12, 12, marks=pytest.mark.slow),
        (BETWEEN_PAYING_AND_ANSWERING_12, 11, 12),
    ],
    ids=["after an answer", "between paying and answering"],
)
def test_a_killed_run_resumes_without_paying_or_answering_twice(tmp_path, fault, answered, paid):
    code = textwrap.dedent(KILLED).format(fault=textwrap.dedent(fault), folder=tmp_path.as_posix())
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert result.returncode == -signal.SIGKILL, result.stderr.decode()
    journal = (tmp_path / "answers.jsonl").read_text()
    assert journal.count('"answers"') == answered
    ledger = Ledger(tmp_path / "run.ledger")
    assert len(list(ledger.history())) == paid
    options = {"ledger": ledger, "folder": tmp_path, "rng": None, "max_answers": 30}
    model = small(**options).fit(X, Y, PUBLIC)
    # Each of the 30 queries is paid for once; a payment without its answer is lost.
    assert len(list(ledger.history())) == 30 + (paid - answered)
    after = (tmp_path / "answers.jsonl").read_text()
    assert after.startswith(journal)
    assert after.count('"answers"') == 30
    assert np.all(model.labels_ != NO_ANSWER)
    again = small(**options).fit(X, Y, PUBLIC)
    assert again.labels_.tolist() == model.labels_.tolist()
    assert len(list(ledger.history())) == 30 + (paid - answered)


@pytest.fixture
def kill_at(monkeypatch):
    """Ends a run after so many answers are on disk, or never for None."""
    record = Journal.record
    limit: list[int | None] = [None]

    def killed(self, queries, labels):
        record(self, queries, labels)
        if len(self) == limit[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "record", killed)
    return lambda count: limit.__setitem__(0, count)


def test_a_resumed_run_with_a_seed_draws_no_noise_twice(tmp_path, kill_at, monkeypatch):
    drawn = []
    release = GaussianMechanism.release

    def noted(self, value, rng=None):
        released = release(self, value, rng)
        drawn.append(tuple((np.asarray(released) - value).ravel().round(9)))
        return released

    monkeypatch.setattr(GaussianMechanism, "release", noted)
    ledger = Ledger()
    for stop in (7, 19, None):
        kill_at(stop)
        with contextlib.suppress(KeyboardInterrupt):
            small(ledger=ledger, folder=tmp_path, max_answers=30).fit(X, Y, PUBLIC)
    assert len(drawn) == len(set(drawn)) == 30


def test_a_run_killed_inside_its_first_line_begins_again(tmp_path):
    (tmp_path / "answers.jsonl").write_bytes(b'{"kind": "tacit-pate-answers", "run": "ab')
    assert small(folder=tmp_path).fit(X, Y, PUBLIC).n_answered_ == 30


def test_a_file_of_someone_elses_is_not_overwritten(tmp_path):
    (tmp_path / "answers.jsonl").write_text("my answers")
    with pytest.raises(LedgerError, match="not a journal"):
        small(folder=tmp_path).fit(X, Y, PUBLIC)
    assert (tmp_path / "answers.jsonl").read_text() == "my answers"


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_a_budget_chooses_noise_and_queries_and_is_spent_to_the_last_percent(epsilon):
    public, _ = blobs(300, seed=1)
    model = PATEClassifier(
        GaussianNB(), epsilon=epsilon, delta=1e-5, n_teachers=40, classes=range(3), rng=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # noise at the smallest budget
        model.fit(X, Y, public)
        assert model.event_ == model.plan_event(300)
    spent = model.ledger_.epsilon(delta=1e-5)
    assert 0.98 * epsilon < spent <= epsilon
    assert len(model.ledger_.history()) == 1
    assert 30 <= len(model.queries_) <= 300
    assert model.n_answered_ == len(model.queries_)


def test_larger_budgets_buy_more_answers_or_less_noise():
    from tacit.pate.classifier import spend_budget

    options = {"delta": 1e-5, "n_teachers": 250, "n_classes": 10, "n_public": 9000}
    found = [spend_budget(epsilon=epsilon, **options) for epsilon in (1.0, 2.0, 4.0, 20.0)]
    assert [s.n_queries for s in found] == sorted(s.n_queries for s in found)
    assert found[-1].n_queries == 1000
    assert all(s.sigma <= 250 / 5 for s in found[1:])  # the first one asks 100, the least
    with pytest.warns(UserWarning, match="most labels will be wrong"):
        spend_budget(epsilon=0.1, **options | {"n_teachers": 20})


def test_defaults_without_a_budget_state_their_price():
    with pytest.warns(UserWarning, match=r"will cost epsilon \d+\.\d at delta 1e-05"):
        PATEClassifier(GaussianNB(), n_teachers=20, rng=0).fit(X, Y, PUBLIC)


@pytest.mark.parametrize("is_kept", [False, True], ids=["in memory", "in a folder"])
def test_queries_that_are_fixed_in_advance_are_paid_for_at_once(is_kept, tmp_path):
    """As one event, the price is that of the event; one by one, the filter charges more."""
    public, _ = blobs(60, seed=1)
    ledger = Ledger(budget=Budget(epsilon=30.0, delta=1e-5))
    options = {"n_teachers": 20, "n_queries": 40, "ledger": ledger, "rng": 0}
    options |= {"folder": tmp_path} if is_kept else {}
    PATEClassifier(GaussianNB(), **options).fit(X, Y, public)
    assert len(ledger.history()) == 1
    assert [entry.event for entry in ledger.history()] == [GNMax(4.0).event(40).parts[0]]


def test_a_budget_rules_out_settings_that_it_chooses():
    public, _ = blobs(60, seed=1)
    budget = {"epsilon": 1.0, "delta": 1e-5}
    for other in ({"aggregator": GNMax(4.0)}, {"max_answers": 3}):
        with pytest.raises(ValueError, match="must be None with epsilon"):
            PATEClassifier(GaussianNB(), **budget, **other).fit(X, Y, public)
    with pytest.raises(TypeError, match="delta must be in"):
        PATEClassifier(GaussianNB(), epsilon=1.0).fit(X, Y, public)
    with pytest.raises(ValueError, match="together with epsilon"):
        PATEClassifier(GaussianNB(), delta=1e-5).fit(X, Y, public)

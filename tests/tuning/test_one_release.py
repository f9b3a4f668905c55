"""One payment is for one release, however a search is repeated, and a search leaves no files."""

import os
import tempfile
import threading
from pathlib import Path

import pytest
import toy_estimator as toy

import tacit
from tacit.tuning import CheapTrials, EveryConfiguration, PrivateSearch
from tacit.tuning import search as search_module

LEVELS = {"level": [0.1, 0.5, 0.9]}
LAWS = [EveryConfiguration(), CheapTrials()]


def search_with(ledger, law, estimator=None):
    return PrivateSearch(estimator or toy.Toy(), LEVELS, runs=law, ledger=ledger)


def released(search):
    return search.best_score_, search.best_estimator_.coef_.tolist()


@pytest.mark.parametrize("law", LAWS, ids=repr)
@pytest.mark.parametrize("are_kept", [True, False])
def test_a_search_that_is_killed_before_its_end_releases_the_same(
    tmp_path, monkeypatch, law, are_kept
):
    """Outcomes are kept, and if they are lost, their noise follows from the stored seed."""
    X, y = toy.records(300)
    if not are_kept:
        monkeypatch.setattr("tacit.tuning.unfinished._secret_of_account", lambda: None)
    found = []
    with tacit.Ledger(tmp_path / "a.ledger") as ledger:
        for is_killed in (True, True, False):
            search = search_with(ledger, law)
            try:
                with search.fitting(X, y):
                    found.append(released(search))
                    if is_killed:
                        raise KeyboardInterrupt
            except KeyboardInterrupt:
                pass
        assert len(ledger.history()) == 1
        assert found[0] == found[1] == found[2]
        again = search_with(ledger, law).fit(X, y)  # another search
        assert len(ledger.history()) == 2
        assert released(again) != found[0]
    assert not [name for name in os.listdir(tmp_path) if "search" in name or "pending" in name]


def test_an_interrupt_at_the_end_has_released_nothing(tmp_path, monkeypatch):
    X, y = toy.records(300)

    def killed(_):
        raise KeyboardInterrupt

    with tacit.Ledger(tmp_path / "a.ledger") as ledger:
        search = search_with(ledger, EveryConfiguration())
        with monkeypatch.context() as patch:
            patch.setattr(search_module.Unfinished, "delete", killed)
            with pytest.raises(KeyboardInterrupt):
                search.fit(X, y)
        assert not hasattr(search, "best_estimator_")
        search.fit(X, y)
        assert len(ledger.history()) == 1


def test_the_same_search_is_refused_while_it_is_under_way(tmp_path):
    X, y = toy.records(300)
    path = tmp_path / "a.ledger"
    begun, goes_on, kinds = threading.Event(), threading.Event(), []

    def first():
        with tacit.Ledger(path) as ledger, search_with(ledger, LAWS[0]).fitting(X, y):
            begun.set()
            assert goes_on.wait(30)

    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(30)
    try:
        with tacit.Ledger(path) as ledger:
            with pytest.raises(BlockingIOError, match="under way in another process"):
                search_with(ledger, LAWS[0]).fit(X, y)
            search_with(ledger, LAWS[0]).fit(X + 1, y)  # another search
            kinds.append(len(ledger.history()))
    finally:
        goes_on.set()
        thread.join()
    assert kinds == [2]
    with tacit.Ledger(path) as ledger:
        search_with(ledger, LAWS[0]).fit(X, y)
        assert len(ledger.history()) == 3


def test_what_a_killed_search_left_can_be_deleted(tmp_path):
    X, y = toy.records(300)
    with tacit.Ledger(tmp_path / "a.ledger") as ledger:
        search = search_with(ledger, LAWS[0])
        with pytest.raises(KeyboardInterrupt), search.fitting(X, y):
            raise KeyboardInterrupt
        assert list(tmp_path.glob(".a.ledger.search-*"))
        search.forget(X + 1, y)
        assert list(tmp_path.glob(".a.ledger.search-*"))
        search.forget(X, y)
        assert len(ledger.history()) == 1
    assert not [name for name in os.listdir(tmp_path) if "search" in name or "pending" in name]


class Caches(toy.Toy):
    """Keeps what it computed in a folder, as recipes do with features."""

    seen: list[Path] = []  # noqa: RUF012  # of all runs

    def __init__(
        self, level=0.5, epsilon=1.0, delta=1e-6, ledger=None, random_state=None, fail="",
        cache=None,
    ):  # fmt: skip
        super().__init__(level, epsilon, delta, ledger, random_state, fail)
        self.cache = cache

    def fit(self, X, y):
        super().fit(X, y)
        self.cache.mkdir(parents=True, exist_ok=True)
        (self.cache / "features").write_bytes(X.tobytes())
        self.seen.append(self.cache)
        return self


@pytest.mark.parametrize("has_file", [True, False])
@pytest.mark.parametrize("fail", ["", "raise"])
def test_a_search_leaves_no_features_behind(tmp_path, monkeypatch, has_file, fail):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Caches.seen.clear()
    with tacit.Ledger(tmp_path / "a.ledger") if has_file else tacit.Ledger() as ledger:
        search = search_with(ledger, CheapTrials(), Caches(fail=fail))
        if fail:
            with pytest.raises(tacit.tuning.SearchFailed):
                search.fit(*toy.records(300))
        else:
            assert search.fit(*toy.records(300)).best_estimator_.cache is None
            assert len(set(Caches.seen)) == 1  # runs share what they compute
    assert {path.name for path in tmp_path.iterdir()} <= {"a.ledger"}


def test_an_estimator_with_a_folder_of_its_own_is_refused(tmp_path):
    search = search_with(None, EveryConfiguration(), Caches(cache=tmp_path))
    with pytest.raises(ValueError, match="must not have a cache"):
        search.fit(*toy.records(300))


def test_a_plan_pays_nothing_and_is_that_of_the_search(tmp_path):
    with tacit.Ledger(tmp_path / "a.ledger") as ledger:
        search = search_with(ledger, EveryConfiguration())
        plan = search.plan(*toy.records(300))
        assert ledger.history() == []
        assert search.fit(*toy.records(300)).plan_ == plan

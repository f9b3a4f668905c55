"""Sweeps: every cell once, resumable, with the price of releasing all."""

import functools
import threading

import joblib
import pytest

from tacit import Ledger, accounting
from tacit.events import Sequence
from tacit.experiments import Recipe, RunFolder, Sweep, sweep, train
from tacit.experiments import training_loop as module
from tacit.experiments.training_run import PaidRun, take_steps
from tacit.ledger.store import Store
from tacit.training import Private

RECIPE = Recipe.parse(
    """
    [training]
    batch_size = 360
    epochs = 1
    [run]
    seed = 5
    baseline_steps = 30
    """
)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweeps") / "digits"
    result = sweep(RECIPE, folder, epsilons=[4, 1], deltas=[1e-5, 1e-4], repeats=2)
    return result, folder


def test_a_sweep_covers_the_grid(swept):
    result, folder = swept
    found = [(cell.delta, cell.epsilon, cell.seed) for cell in result.cells]
    assert found == [(d, e, s) for d in (1e-5, 1e-4) for e in (1.0, 4.0) for s in (5, 6)]
    assert all(cell.spent <= cell.epsilon for cell in result.cells)
    assert Sweep.read(folder) == result
    with pytest.raises(FileNotFoundError, match="no finished sweep"):
        Sweep.read(folder.parent)


def test_each_runs_facts_tell_of_its_siblings(swept):
    result, folder = swept
    for cell in result.cells:
        utility = RunFolder(folder / cell.folder).facts().utility
        assert utility.private[0].seed == cell.seed
        assert {one.seed for one in utility.private} == {5, 6}
    summary = result.summaries[0]
    assert summary.runs == 2
    assert summary.accuracy == pytest.approx(sum(c.accuracy for c in result.cells[:2]) / 2)
    assert summary.spread is not None


def test_the_twin_is_trained_once_and_shared(swept):
    result, folder = swept
    rows = RunFolder(folder).read_lines("baseline.jsonl")
    assert result.baseline == rows[-1]
    for cell in result.cells:
        assert RunFolder(folder / cell.folder).read_lines("baseline.jsonl") == rows


def test_releasing_every_run_costs_the_sum_of_their_events(swept):
    result, folder = swept
    claims = tuple(RunFolder(folder / cell.folder).facts().claim for cell in result.cells)
    upper = accounting.epsilon(Sequence(claims), delta=1e-5)
    assert result.epsilon_of_all == pytest.approx(upper)
    assert result.epsilon_of_all > max(cell.spent for cell in result.cells)


def test_called_again_it_trains_only_what_is_missing(swept, monkeypatch):
    result, folder = swept
    monkeypatch.setattr(module, "train_baseline", lambda *_, **__: pytest.fail("trained again"))
    (folder / result.cells[0].folder / "facts.json").unlink()
    with pytest.raises(ValueError, match="no checkpoint"):
        sweep(RECIPE, folder, epsilons=[1, 4], deltas=[1e-5, 1e-4], repeats=2)


@pytest.mark.slow
def test_parallel_runs_cost_what_serial_ones_cost(swept, tmp_path):
    """A worker goes on with a run that was paid, under a key of its own: see docs/guarantees.md."""
    result, _ = swept
    parallel = sweep(
        RECIPE, tmp_path / "digits", epsilons=[1, 4], deltas=[1e-5, 1e-4], repeats=2, jobs=2
    )
    for one, other in zip(result.cells, parallel.cells, strict=True):
        assert one.accuracy == pytest.approx(other.accuracy, abs=0.15)
        assert one.spent == other.spent


@pytest.mark.slow
def test_the_starting_process_pays_before_workers_take_steps(swept, tmp_path, monkeypatch):
    result, folder = swept
    first, payers, steps = RunFolder(folder / result.cells[1].folder), set(), set()
    monkeypatch.setattr(Store, "transaction", noting(payers, Store.transaction))
    monkeypatch.setattr(Private, "step", noting(steps, Private.step))
    path = tmp_path / "digits"
    with joblib.parallel_config("threading"):
        again = sweep(RECIPE, path, epsilons=[1], deltas=[1e-5], repeats=2, jobs=2)
    assert payers == {threading.main_thread()}
    assert steps
    assert threading.main_thread() not in steps
    found = RunFolder(path / again.cells[1].folder)
    assert found.facts().claim == first.facts().claim
    assert found.facts().resumed == 0
    assert found.facts().ledger_state["entries_of_run"] == [1]
    with Ledger(found / "run.ledger") as ledger:
        assert [entry.kind for entry in ledger.history()] == ["plan"]
        assert ledger.resume(1).taken == ledger.resume(1).steps > found.facts().steps


def noting(threads, method):
    @functools.wraps(method)
    def noted(self, *given, **options):
        if getattr(self, "path", "") is not None:  # not the ledger in the memory of a worker
            threads.add(threading.current_thread())
        return method(self, *given, **options)

    return noted


def test_a_worker_without_the_folder_of_the_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="file system"):
        take_steps(PaidRun(RECIPE, tmp_path / "nowhere", None, tmp_path))
    assert not (tmp_path / "nowhere").exists()


def test_an_empty_grid_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one epsilon"):
        sweep(RECIPE, tmp_path / "none", epsilons=[])


def test_a_twin_of_public_records_is_not_shown_where_they_are_private(swept, tmp_path):
    _, folder = swept
    private = RECIPE.with_settings({"data.is_public": False})
    with pytest.raises(ValueError, match="sweep of another recipe"):
        sweep(private, folder, epsilons=[2])
    path = tmp_path / "digits"
    RunFolder(path).write_lines("baseline.jsonl", [{"step": 1, "epoch": 1, "accuracy": 0.9}])
    assert sweep(private, path, epsilons=[2]).baseline is None
    rows = RunFolder(folder).read_lines("baseline.jsonl")
    facts = train(private, tmp_path / "one", baseline=rows)
    assert facts.utility.non_private == ()
    assert not (tmp_path / "one" / "baseline.jsonl").exists()


def test_other_budgets_join_a_sweep_of_the_same_recipe(swept, monkeypatch):
    _, folder = swept
    monkeypatch.setattr(module, "train_baseline", lambda *_, **__: pytest.fail("trained again"))
    assert sweep(RECIPE, folder, epsilons=[2], deltas=[1e-5]).baseline is not None

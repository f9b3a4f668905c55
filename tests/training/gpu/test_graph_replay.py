"""A flag reported in the middle of a step. The graphs need a GPU: test_loop_on_gpu."""

from types import SimpleNamespace

import pytest
import torch
from looped_reference import compiled_sum
from torch.fx.experimental.proxy_tensor import make_fx

from tacit.training.clipping.clip import Flat
from tacit.training.gpu.graph_pair import Traced
from tacit.training.gpu.graph_replay import FiniteFlag, ReplayedStep, report, warm_up


def test_a_reported_flag_arrives_and_the_value_is_passed_on():
    flag, other = (FiniteFlag(torch.device("cpu")) for _ in range(2))
    value = torch.randn(3)
    for _ in range(3):
        flag.clear()
        assert flag.all_finite()  # nothing was reported
        for _ in range(5):
            flag.expect()
            assert torch.equal(report(value, torch.tensor(True), flag), value)
        assert flag.all_finite()
        for held in (False, True):
            flag.expect()
            report(value, torch.tensor(held), flag)
        assert not flag.all_finite()
    assert other.all_finite()  # nothing was reported here


def test_a_report_can_be_traced_and_is_not_optimized_away():
    flag = FiniteFlag(torch.device("cpu"))
    traced = make_fx(lambda x: report(x * 2, (x > 0).all(), flag) + 1, tracing_mode="fake")
    graph = traced(torch.ones(2))
    graph.graph.eliminate_dead_code()
    flag.expect()
    assert flag._arrived[0] == 0  # tracing reports nothing
    assert graph(-torch.ones(2)).tolist() == [-1.0, -1.0]
    assert not flag.all_finite()


def test_a_warm_up_reports_nothing():
    flag = FiniteFlag(torch.device("cpu"))
    with warm_up():
        report(torch.ones(1), torch.tensor(False), flag)
    flag.expect()
    report(torch.ones(1), torch.tensor(True), flag)
    assert flag.all_finite()


def test_a_report_that_never_arrives_is_an_error(monkeypatch):
    class Over:
        def query(self):
            return True

    monkeypatch.setattr(torch.cuda, "current_stream", Over)
    flag = FiniteFlag(torch.device("cpu"))
    flag.expect()
    with pytest.raises(RuntimeError, match="without reporting"):
        flag.all_finite()


def test_an_interrupted_lot_is_waited_for_before_the_next(monkeypatch):
    flag, waited = FiniteFlag(torch.device("cpu")), []

    class Stream:
        def synchronize(self):
            waited.append(report(torch.ones(1), torch.tensor(False), flag))  # arrives late

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    flag.expect()
    flag.clear()
    assert len(waited) == 1
    flag.expect()
    report(torch.ones(1), torch.tensor(True), flag)
    assert flag.all_finite()
    flag.clear()
    assert len(waited) == 1


def test_a_scale_whose_setting_was_interrupted_is_set_again():
    class Scalar:
        value, is_interrupted = 1.0, False

        def fill_(self, value):
            if self.is_interrupted:
                raise KeyboardInterrupt
            self.value = value

    replayed = ReplayedStep.__new__(ReplayedStep)  # made without a GPU
    replayed._factor, replayed._seed, replayed._scale = Scalar(), Scalar(), 1.0
    replayed._seed.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        replayed._set_scale(2.0)
    replayed._seed.is_interrupted = False
    replayed._set_scale(1.0)  # as it was before
    assert (replayed._factor.value, replayed._seed.value) == (1.0, 1.0)
    replayed._set_scale(2.0)
    assert (replayed._factor.value, replayed._seed.value) == (2.0, 0.5)


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_and_what_follows_are_recorded_once_for_each_kind_of_launches(monkeypatch, fails):
    done, recorded = [], []

    def captured(run, pool):
        assert pool == "pool"
        if fails:
            raise RuntimeError("capture")
        before = len(done)
        run()
        recorded.append(done[before:])
        del done[before:]  # recorded, not run
        return SimpleNamespace(replay=lambda: done.extend(recorded[-1])), None

    monkeypatch.setattr("tacit.training.gpu.graph_replay.captured", captured)
    replayed = ReplayedStep.__new__(ReplayedStep)  # made without a GPU
    replayed._pool, replayed._followed = "pool", None
    replayed._run = lambda: done.append("sum")
    replayed._graph = SimpleNamespace(replay=lambda: done.append("sum"))
    for launches, name in ((first := object(), "a"), (first, "a"), (object(), "b")):
        done.clear()
        replayed.replay_with(launches, lambda name=name: done.append(name))
        assert done == ["sum", name]
    assert len(recorded) == (0 if fails else 2)


def test_a_sum_that_failed_is_not_waited_for_but_taken_again(monkeypatch):
    class Stream:
        def synchronize(self):
            pass

    def fail():
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    model = torch.nn.Linear(2, 1)
    compiled = compiled_sum(model, lambda *_: torch.zeros(1), Flat(1.0))
    compiled._flag = FiniteFlag(torch.device("cpu"))
    compiled.begin()
    with pytest.raises(torch.OutOfMemoryError):
        compiled._run(Traced(lambda *_: [], 0, draws=False), fail, reuse=True)
    assert not compiled.all_finite()
    compiled.begin()
    assert compiled.all_finite()


def test_graphs_are_built_anew_where_convolutions_round_otherwise(monkeypatch):
    # The room that norms leave for rounding is part of a graph.
    compiled = compiled_sum(torch.nn.Conv1d(1, 1, 1), lambda *_: torch.zeros(1), Flat(1.0))
    compiled._device = torch.device("cuda")
    states = []
    for precision in ("ieee", "tf32"):
        setting = SimpleNamespace(fp32_precision=precision)
        monkeypatch.setattr(torch.backends.cudnn, "conv", setting, raising=False)
        states.append(compiled._state())
    assert states[0] != states[1]

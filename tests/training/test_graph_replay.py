"""A number told from the middle of the work. The graphs need a GPU: test_loop_on_gpu."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tacit.training.clip import Flat
from tacit.training.gpu.compiled import CompiledSum
from tacit.training.gpu.graph_replay import Captured, Mailbox, rehearsal, tell
from tacit.training.gpu.partition import Traced


def test_what_is_told_arrives_and_the_value_goes_on():
    mailbox, other = (Mailbox(torch.device("cpu")) for _ in range(2))
    value = torch.randn(3)
    for _ in range(3):
        mailbox.clear()
        assert mailbox.all_held()  # nothing was told
        for _ in range(5):
            mailbox.expect()
            assert torch.equal(tell(value, torch.tensor(True), mailbox), value)
        assert mailbox.all_held()
        for held in (False, True):
            mailbox.expect()
            tell(value, torch.tensor(held), mailbox)
        assert not mailbox.all_held()
    assert other.all_held()  # nothing came here


def test_telling_can_be_traced_and_is_not_optimized_away():
    mailbox = Mailbox(torch.device("cpu"))
    traced = make_fx(lambda x: tell(x * 2, (x > 0).all(), mailbox) + 1, tracing_mode="fake")
    graph = traced(torch.ones(2))
    graph.graph.eliminate_dead_code()
    mailbox.expect()
    assert mailbox._arrived[0] == 0  # tracing tells nothing
    assert graph(-torch.ones(2)).tolist() == [-1.0, -1.0]
    assert not mailbox.all_held()


def test_a_rehearsal_tells_nothing():
    mailbox = Mailbox(torch.device("cpu"))
    with rehearsal():
        tell(torch.ones(1), torch.tensor(False), mailbox)
    mailbox.expect()
    tell(torch.ones(1), torch.tensor(True), mailbox)
    assert mailbox.all_held()


def test_an_answer_that_never_comes_is_an_error(monkeypatch):
    class Over:
        def query(self):
            return True

    monkeypatch.setattr(torch.cuda, "current_stream", Over)
    mailbox = Mailbox(torch.device("cpu"))
    mailbox.expect()
    with pytest.raises(RuntimeError, match="without telling"):
        mailbox.all_held()


def test_an_interrupted_lot_is_waited_for_before_the_next(monkeypatch):
    mailbox, waited = Mailbox(torch.device("cpu")), []

    class Stream:
        def synchronize(self):
            waited.append(tell(torch.ones(1), torch.tensor(False), mailbox))  # arrives late

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    mailbox.expect()
    mailbox.clear()
    assert len(waited) == 1
    mailbox.expect()
    tell(torch.ones(1), torch.tensor(True), mailbox)
    assert mailbox.all_held()
    mailbox.clear()
    assert len(waited) == 1


def test_a_scale_whose_setting_was_interrupted_is_set_again():
    class Scalar:
        value, is_interrupted = 1.0, False

        def fill_(self, value):
            if self.is_interrupted:
                raise KeyboardInterrupt
            self.value = value

    captured = Captured.__new__(Captured)  # made without a GPU
    captured._factor, captured._seed, captured._scale = Scalar(), Scalar(), 1.0
    captured._graph, captured._results = Mock(), []
    captured._seed.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        captured._replay(2.0)
    captured._seed.is_interrupted = False
    captured._replay(1.0)  # as it was before
    assert (captured._factor.value, captured._seed.value) == (1.0, 1.0)
    captured._replay(2.0)
    assert (captured._factor.value, captured._seed.value) == (2.0, 0.5)


def test_a_sum_that_failed_is_not_waited_for_but_taken_again(monkeypatch):
    class Stream:
        def synchronize(self):
            pass

    def fail():
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    model = torch.nn.Linear(2, 1)
    compiled = CompiledSum(model, lambda *_: torch.zeros(1), Flat(1.0))
    compiled._mailbox = Mailbox(torch.device("cpu"))
    compiled.begin()
    with pytest.raises(torch.OutOfMemoryError):
        compiled._run(Traced(lambda *_: [], 0, draws=False), fail, reuse=True)
    assert not compiled.all_finite()
    compiled.begin()
    assert compiled.all_finite()


def test_graphs_are_built_anew_where_convolutions_round_otherwise(monkeypatch):
    # The room that norms leave for rounding is part of a graph.
    compiled = CompiledSum(torch.nn.Conv1d(1, 1, 1), lambda *_: torch.zeros(1), Flat(1.0))
    compiled._device = torch.device("cuda")
    states = []
    for precision in ("ieee", "tf32"):
        setting = SimpleNamespace(fp32_precision=precision)
        monkeypatch.setattr(torch.backends.cudnn, "conv", setting, raising=False)
        states.append(compiled._state())
    assert states[0] != states[1]

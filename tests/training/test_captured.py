"""A number told from the middle of the work. The graphs need a GPU: test_loop_on_gpu."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tacit.training.captured import Mailbox, rehearsal, tell


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

"""A number told from the middle of the work. The graphs need a GPU: test_loop_on_gpu."""

import pytest
import torch

from tacit.training.captured import Mailbox, tell


def test_what_is_told_arrives_and_the_value_goes_on():
    mailbox, other = Mailbox(), Mailbox()
    for box in (mailbox, other):
        box.clear()
    value = torch.randn(3)
    passed = tell(value, torch.tensor(True), mailbox)
    assert torch.equal(passed, value)
    assert mailbox.read() == 1.0
    mailbox.clear()
    tell(value, torch.tensor(False), mailbox)
    assert mailbox.read() == 0.0
    assert other._number[0] < 0  # nothing came here


def test_telling_can_be_traced_and_is_not_optimized_away():
    mailbox = Mailbox()
    mailbox.clear()
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: tell(x * 2, (x > 0).all(), mailbox) + 1, tracing_mode="fake")(
        torch.ones(2)
    )
    graph.graph.eliminate_dead_code()
    assert mailbox._number[0] < 0  # tracing tells nothing
    assert graph(torch.ones(2)).tolist() == [3.0, 3.0]
    assert mailbox.read() == 1.0


def test_an_answer_that_never_comes_is_an_error(monkeypatch):
    class Over:
        def query(self):
            return True

    monkeypatch.setattr(torch.cuda, "current_stream", Over)
    mailbox = Mailbox()
    mailbox.clear()
    with pytest.raises(RuntimeError, match="without telling"):
        mailbox.read()

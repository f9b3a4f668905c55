"""The order of examples is known even where the first gradients are zero, which show no order."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tacit.training import Flat, clipped_sum, make_private
from tacit.training.engines import bookkeeping
from tacit.training.examples import Examples
from tacit.training.gpu.compiled import CompiledSum
from tacit.training.gradients.site import Unsupported

C = Flat(0.1)
ROWS, LENGTH = 8, 4


class Interleaved(nn.Module):
    """Steps of all examples side by side; the head may begin with zeros."""

    def __init__(self, *, is_zero=False, kind=nn.Linear):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(5, 4), nn.Linear(4, 3)
        if is_zero:
            nn.init.zeros_(self.head.weight)

    def forward(self, x):
        steps = x.transpose(0, 1).flatten(0, 1)  # the examples vary fastest
        steps = torch.tanh(self.inner(steps)).unflatten(0, (x.shape[1], -1))
        return self.head(steps.transpose(0, 1).mean(1))


class Reordered(Interleaved):
    def forward(self, x):
        return self.head(torch.tanh(self.inner(x.flip(0))).mean(1).flip(0))


class Sorted(Interleaved):
    def forward(self, x):
        order = x[:, 0, 0].argsort()
        return self.head(torch.tanh(self.inner(x[order])).mean(1)[order.argsort()])


class Dead(Interleaved):
    """A layer whose result passes through a ReLU for the example of the largest input only."""

    def forward(self, x):
        steps = self.inner(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (x.shape[1], -1))
        shown = x[:, :, :1] > 1.5
        return self.head(torch.where(shown, steps.transpose(0, 1), 0.0).mean(1))


def squares(model, batch):
    return model(batch[0]).square().sum(1) + model(batch[0])[:, 0]


def margins(model, batch):
    """A loss that is flat for the examples whose margin is large."""
    return F.relu(model(batch[0]).sum(1) - batch[1])


def a_batch(active=range(ROWS)):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, LENGTH, 5, generator=generator)
    margin = torch.full((ROWS,), 1e3)
    margin[list(active)] = -1e3
    return x, margin


def compare(model, loss_fn, batch, **options):
    found, expected = (
        clipped_sum(model, loss_fn, batch, C, **options).sums for engine in ("auto", "loop")
    )
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total.to(found[name]), rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*one example at a time")
@pytest.mark.parametrize("kind", [Interleaved, Reordered, Sorted])
@pytest.mark.parametrize("rows", [1, 2, ROWS])
def test_a_head_that_begins_with_zeros_hides_no_order(kind, rows):
    model, batch = kind(is_zero=True), tuple(t[:rows] for t in a_batch())
    compare(model, squares, batch)
    nn.init.normal_(model.head.weight)  # as after a step
    compare(model, squares, a_batch())
    compare(model, squares, batch)


ACTIVE = [(), (0,), (7,), (0, 1), (3, 6), (4, 5, 6, 7), range(ROWS)]


@pytest.mark.parametrize("active", ACTIVE)
@pytest.mark.parametrize("kind", [Interleaved, Reordered, Dead])
def test_flat_losses_hide_no_order(kind, active):
    model = kind()
    compare(model, margins, a_batch(active))
    compare(model, margins, a_batch())
    compare(model, margins, a_batch(active), augmentations=2)
    # One example alone gives no more than the clip norm, whatever was found before.
    alone = clipped_sum(model, margins, a_batch([2]), C).sums
    assert sum(float(total.square().sum()) for total in alone.values()) <= C.clip_norm**2


def test_what_is_in_order_stays_with_the_fast_engine():
    for model, batch in ((Interleaved(is_zero=True), a_batch()), (Interleaved(), a_batch([4, 7]))):
        clipped_sum(model, margins, batch, C)
        (trace,) = bookkeeping._traces[model].values()
        assert trace.is_confirmed


def test_a_loss_that_is_flat_for_all_confirms_nothing():
    mask, model = torch.ones(ROWS, dtype=torch.bool), Interleaved()
    with pytest.raises(Unsupported, match="no example has a gradient"):
        bookkeeping.confirmed_trace(Examples(model, margins, a_batch([]), mask), C)
    shown = Examples(model, margins, a_batch([2, 5]), mask)
    assert bookkeeping.confirmed_trace(shown, C).is_confirmed


@pytest.mark.parametrize("is_zero", [True, False])
def test_a_loop_of_the_users_takes_the_same_steps(is_zero):
    ends = []
    for way in ("step", "loop"):
        model, (x, y) = Interleaved(is_zero=is_zero), a_batch([4, 6])
        optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
        options = {"clip_norm": 0.1, "noise_multiplier": 0.0, "seed": 1, "check": False}
        private = make_private(
            model, optimizer, (x, y), margins, batch_size=ROWS, steps=3, **options
        )
        for lot in private:
            if way == "step":
                private.step(lot)
            else:
                private.backward(margins(model, lot))
                optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*ends)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # raised inside the compiler
@pytest.mark.parametrize("active", [(4, 5), range(ROWS)])
def test_a_compiled_sum_knows_the_order(active):
    for model in (Interleaved(is_zero=True), Interleaved()):
        compiled = CompiledSum(model, margins, C)
        compiled(a_batch(active), torch.ones(ROWS))
        nn.init.normal_(model.head.weight)
        found = compiled(a_batch(), torch.ones(ROWS)).sums
        expected = alone(model, margins, a_batch(), C).sums
        for name, total in expected.items():
            torch.testing.assert_close(found[name], total.to(found[name]), rtol=1e-4, atol=1e-6)


class Switched(nn.Module):
    """A weight that is used on rows and on columns, in an order that a flag or a buffer sets."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.flag = nn.Linear(5, 5), False
        self.register_buffer("turn", torch.zeros(()))

    def forward(self, x):
        if self.flag:
            turned = self.inner(x.sin().transpose(0, 1)).transpose(0, 1)
            return torch.tanh(self.inner(x)) + 2 * turned
        x = x.transpose(0, 1) if self.turn.item() else x
        h = torch.tanh(self.inner(x))
        h = h.transpose(0, 1) if self.turn.item() else h
        return h + 2 * self.inner(h)


@pytest.mark.parametrize("rows", [LENGTH, LENGTH + 1])
def test_axes_that_change_places_are_seen_in_a_batch_as_long_as_its_sequences(rows):
    def loss(model, batch):
        return model(batch[0]).square().flatten(1).sum(1)

    model, batch = Switched(), (torch.randn(rows, LENGTH, 5),)
    for flag, turn in ((False, 0.0), (True, 0.0), (False, 1.0), (False, 0.0), (True, 1.0)):
        model.flag = flag
        model.turn.fill_(turn)
        compare(model, loss, batch)


def test_batches_that_the_program_wants_sorted_run_one_at_a_time():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(5, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return self.head(self.rnn(packed)[1][-1])

    def loss(model, batch):
        return model(*batch).square().sum(1)

    batch = torch.randn(5, LENGTH, 5), torch.tensor([4, 4, 3, 2, 1])
    model = Packed()
    with pytest.warns(RuntimeWarning, match="one example at a time"):
        compare(model, loss, batch)
    compare(copy.deepcopy(model), loss, (batch[0], torch.full((5,), LENGTH)))

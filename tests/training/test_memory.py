"""Out of memory: half the rows, and on."""

import gc
import weakref

import pytest
import torch
from torch import nn

from tacit.training.clipping import Flat, clipped_sum
from tacit.training.engines import trace, vmap
from tacit.training.engines.tape import Recorder
from tacit.training.memory import in_pieces, starting_limit, usual_lot
from tacit.training.records import Micro, n_rows

CPU = torch.device("cpu")


def summing(fits):
    def compute(micro):
        if n_rows(micro.batch) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return float((micro.batch[0] * (1.0 if micro.weights is None else micro.weights)).sum())

    return compute


@pytest.mark.parametrize("fits", [1, 2, 3, 5, 11])
def test_halves_add_up_to_the_whole(fits):
    heard = []
    micro = Micro((torch.arange(11.0),), (torch.arange(11) < 7).float())
    assert sum(in_pieces(summing(fits), micro, on_halved=heard.append)) == 21.0
    assert (heard == []) == (fits == 11)
    assert sorted(heard, reverse=True)[:1] in ([], [6])


def test_one_example_that_does_not_fit_raises():
    with pytest.raises(torch.OutOfMemoryError):
        in_pieces(summing(0), Micro((torch.zeros(4),), None), on_halved=lambda rows: None)


def test_other_errors_pass_through():
    def compute(micro):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        in_pieces(compute, Micro((torch.zeros(4),), None), on_halved=lambda rows: None)


def test_a_step_goes_on_with_smaller_batches_and_the_same_sum(problem, monkeypatch):
    from tacit.training import machinery as module

    real, calls = module.clipped_sum, []

    def tight(model, loss_fn, batch, *args, **options):
        calls.append(n_rows(batch))
        if n_rows(batch) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(model, loss_fn, batch, *args, **options)

    plain = problem(seed=1, max_microbatch=64)
    short = problem(seed=1, max_microbatch=64)
    for lot in plain.private:
        plain.private.step(lot)
    monkeypatch.setattr(module, "clipped_sum", tight)
    for lot in short.private:
        short.private.step(lot)
    for a, b in zip(plain.model.parameters(), short.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    assert short.private.microbatch <= 5
    assert sum(size > 5 for size in calls) <= 4  # the limit is learned, not hit at every step


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("static", [False, True], ids=["cut", "padded"])
def test_a_limit_lowered_in_mid_run_leaves_every_lot_as_it_was_drawn(
    problem, monkeypatch, workers, static
):
    # Workers had fetched the next lots in larger batches: none may slip into another lot.
    options = {"seed": 1, "steps": 8, "noise_multiplier": 0.0, "static_shapes": static}
    plain = problem(max_microbatch=10, num_workers=workers, **options)
    short = problem(max_microbatch=10, num_workers=workers, **options)
    for lot in plain.private:
        plain.private.step(lot)
    real, clipper = short.private._clipper.clipped_sum, short.private._clipper

    def tight(micro, clip, **options):
        if n_rows(micro.batch) > 5 and short.private.steps_taken == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(micro, clip, **options)

    monkeypatch.setattr(clipper, "clipped_sum", tight)
    for lot in short.private:
        short.private.step(lot)
    assert short.private.microbatch <= 5
    for a, b in zip(plain.model.parameters(), short.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_the_starting_limit_follows_memory_and_lot():
    assert starting_limit(1, CPU, largest_lot=300) == 300
    assert starting_limit(2**34, CPU, largest_lot=300) == 1
    few = starting_limit(2**22, CPU, largest_lot=10**6)
    assert 1 <= few <= 64


def test_lots_above_the_usual_are_rare():
    assert usual_lot(600, deviations=6.0) == 752
    assert usual_lot(256, deviations=2.0) == 288
    assert usual_lot(0.01, deviations=6.0) == 8


def test_vmap_that_runs_out_of_memory_halves_the_batch_instead_of_looping(monkeypatch):
    def full(*_):
        def raising(values, rows):
            raise torch.OutOfMemoryError("CUDA out of memory")

        return raising

    monkeypatch.setattr(vmap, "_per_example", full)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(torch.OutOfMemoryError):
        clipped_sum(model, lambda m, b: m(b).sum(1), torch.ones(3, 2), Flat(1.0), engine="vmap")


def losses_of(model, x):
    return model(x).sum(1)


def deep():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def fail_after(monkeypatch, pieces):
    real, left = Recorder.record, [pieces]

    def record(self, tensor, piece):
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        real(self, tensor, piece)

    monkeypatch.setattr(Recorder, "record", record)


@pytest.mark.parametrize("pieces", range(6))
def test_a_backward_that_ran_out_of_memory_lets_go_of_what_it_held(monkeypatch, pieces):
    # A smaller batch would run out as well, if the larger one stayed.
    model = deep()
    clipped_sum(model, losses_of, torch.ones(2, 3), Flat(1.0), engine="bookkeeping")
    fail_after(monkeypatch, pieces)
    x = torch.ones(5, 3)
    held = weakref.ref(x)
    with pytest.raises(torch.OutOfMemoryError):
        clipped_sum(model, losses_of, x, Flat(1.0), engine="bookkeeping")
    del x
    assert held() is None


def test_so_does_one_in_a_loop_of_somebody_else(problem, monkeypatch):
    case, hidden = problem(batch_size=16, steps=2), []
    fail_after(monkeypatch, 2)  # one of the two layers is done
    batches = case.private.batches()
    x, y = next(batches)
    seen = case.model[2].register_forward_pre_hook(lambda _, args: hidden.append(*args))
    losses = nn.functional.cross_entropy(case.model(x), y, reduction="none")
    seen.remove()
    held = weakref.ref(hidden.pop())
    with pytest.raises(torch.OutOfMemoryError):
        case.private.backward(losses)
    del losses
    assert held() is None


def test_a_model_that_another_engine_takes_keeps_none_of_its_batches():
    class RowByRow(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x):
            return torch.stack([self.inner(row) for row in x])

    model, held = RowByRow(), []
    for _ in range(3):
        x = torch.ones(5, 3)
        held.append(weakref.ref(x))
        clipped_sum(model, losses_of, x, Flat(1.0))
    del x
    assert [ref() for ref in held] == [None] * 3
    gone = weakref.ref(model)
    del model
    gc.collect()  # modules hold themselves
    assert gone() is None


@pytest.mark.parametrize(
    "full",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")],
    ids=["gpu", "cpu"],
)
def test_running_out_while_looking_at_the_model_is_not_held_against_it(monkeypatch, full):
    real, calls = torch.autograd.grad, []

    def short(*args, **options):
        calls.append(args)
        if len(calls) == 1:
            raise full
        return real(*args, **options)

    model, x = deep(), torch.ones(5, 3)
    monkeypatch.setattr(trace.torch.autograd, "grad", short)
    with pytest.raises(RuntimeError, match="memory"):
        clipped_sum(model, losses_of, x, Flat(1.0), engine="bookkeeping")
    clipped_sum(model, losses_of, x, Flat(1.0), engine="bookkeeping")

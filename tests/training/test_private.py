"""The loop: what a step releases, and what it leaves alone."""

import copy
import gc
import os
import pickle
import signal

import numpy as np
import pytest
import torch
from slow_cases import one_fast
from speed_options import with_speed
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import events as ev
from tacit import sampling
from tacit.errors import BudgetExceeded, UnsupportedEvent
from tacit.training import (
    AdaptiveClip,
    Automatic,
    Flat,
    PerLayer,
    ScheduledClip,
    Speed,
    Stairs,
    Views,
)
from tacit.training.plan import count_steps
from tacit.training.program import mapped


def train(run):
    for lot in run:
        run.step(lot)
    return run


def clipped_mean(model, loss_fn, batch, clip_norm, divisor):
    """Reference: one example at a time, in the model's own precision."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(len(batch[1])):
        row = tuple(t[i : i + 1] for t in batch)
        gradient = torch.autograd.grad(loss_fn(model, row).sum(), list(model.parameters()))
        norm = torch.sqrt(sum((g**2).sum() for g in gradient))
        factor = min(1.0, clip_norm / float(norm))
        total = [t + factor * g for t, g in zip(total, gradient, strict=True)]
    return [t / divisor for t in total]


def weights(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


# What a step releases ---------------------------------------------------------------------------


def test_a_step_is_algorithm_1(problem):
    case = problem(batch_size=64, noise_multiplier=0.0, clip_norm=0.3, steps=1)  # rate 1: all drawn
    expected = clipped_mean(case.model, case.loss_fn, (case.x, case.y), 0.3, 64)
    before = [p.detach().clone() for p in case.model.parameters()]
    train(case.private)
    for p, old, gradient in zip(case.model.parameters(), before, expected, strict=True):
        assert torch.allclose(p.grad, gradient, rtol=1e-4, atol=1e-7)
        assert torch.allclose(p, old - 0.1 * gradient, atol=1e-7)


def test_microbatches_do_not_change_the_sum(problem):
    """Peers, entry 18: clipping is of examples, however they are grouped."""
    whole = problem(seed=3, max_microbatch=64)
    train(whole.private)
    for rows in (1, 5, 7):
        case = problem(seed=3, max_microbatch=rows)
        train(case.private)
        assert torch.allclose(weights(case.model), weights(whole.model), atol=1e-6)


def test_the_divisor_is_declared_and_not_drawn(problem):
    """Peers, entry 1: a divisor that follows the data tells neighbors apart."""
    for n in (2, 3, 4, 5):
        setting = {"n": n, "batch_size": 2, "n_records": 5, "check": False}
        case = problem(noise_multiplier=0.0, steps=30, lr=0.0, **setting)
        for lot in case.private:
            x, y = lot
            drawn = sum(len(m.indices) for m in lot.pending())
            expected = clipped_mean(case.model, case.loss_fn, (x, y), 1.0, 2)
            case.private.step(lot)
            for p, gradient in zip(case.model.parameters(), expected, strict=True):
                assert torch.allclose(p.grad, gradient * bool(drawn), atol=1e-6)
        assert case.private.info["expected_batch"] == 2.0


def test_neighbors_are_drawn_at_the_same_declared_rate(problem):
    """Peers, entry 1: N = 2..5, add or remove one record: rate, noise and divisor stay."""
    runs = [problem(n=n, batch_size=2, n_records=5, seed=1).private for n in (2, 3, 4, 5)]
    assert len({run.event for run in runs}) == 1
    assert len({run._plan.sampler for run in runs}) == 1
    assert len({str(run.info) for run in runs}) == 1


def test_one_record_or_none_differ_by_one_clipped_gradient(problem):
    """Peers, entry 8: a fake example in place of an empty batch doubles the sensitivity."""
    clip_norm = 0.5
    one = problem(
        n=1, batch_size=1, n_records=1, noise_multiplier=0.0, clip_norm=clip_norm, steps=1
    )
    train(one.private)
    # The same model on an empty draw: rate so small that nothing comes.
    none = problem(n=1, batch_size=1, n_records=10**9, noise_multiplier=0.0, clip_norm=clip_norm)
    none.private.step(next(iter(none.private)))
    x = torch.cat([p.grad.flatten() for p in one.model.parameters()])
    empty = torch.cat([p.grad.flatten() for p in none.model.parameters()])
    assert torch.equal(empty, torch.zeros_like(empty))
    assert (x - empty).norm() <= clip_norm * (1 + 1e-6)


def test_empty_draws_are_steps_with_noise(problem):
    case = problem(n=8, batch_size=1, n_records=10**8, steps=5)
    seen = []
    for lot in case.private:
        assert list(lot.pending()) == []
        case.private.step(lot)
        seen.append(torch.cat([p.grad.flatten() for p in case.model.parameters()]).clone())
    assert case.private.steps_taken == 5
    assert all(g.abs().min() > 0 for g in seen)
    assert len({tuple(g.tolist()) for g in seen}) == 5


def test_noise_is_added_once_at_the_stated_scale(problem):
    """Variance sigma^2 C^2 / L^2, whatever the number of microbatches; false alarm 1e-6."""
    from scipy.stats import chi2

    values = []
    for rows in (1, 64):
        case = problem(
            n=16, batch_size=16, steps=40, noise_multiplier=3.0, clip_norm=0.5, lr=0.0,
            max_microbatch=rows, seed=7, loss_fn=lambda m, b: 0.0 * m(b[0]).sum(1), check=False,
        )  # fmt: skip
        for lot in case.private:
            case.private.step(lot)
            values.append(torch.cat([p.grad.flatten() for p in case.model.parameters()]).clone())
    noise = torch.stack(values[40:]).double().numpy() / (3.0 * 0.5 / 16)
    assert torch.equal(torch.stack(values[:40]), torch.stack(values[40:]))  # same key, same noise
    size = noise.size
    assert chi2.ppf(5e-7, size) < (noise**2).sum() < chi2.isf(5e-7, size)


@pytest.mark.slow
def test_noise_of_a_thousand_destroys_accuracy(problem):
    """Peers, entry 21: training that is silently not private would still learn."""

    def accuracy(sigma, seed):
        case = problem(n=400, steps=20, batch_size=100, noise_multiplier=sigma, lr=1.0, seed=seed)
        if seed % 2:
            train(case.private)
        else:  # a loop of somebody else
            for _ in case.private:
                case.private.backward()
                case.optimizer.step()
        return float((case.model(case.x).argmax(1) == case.y).float().mean())

    assert accuracy(0.5, seed=5) > 0.9
    assert np.mean([accuracy(1000.0, seed=seed) for seed in range(8)]) < 0.7


def test_every_example_with_a_nan_loss_leaves_pure_noise(problem):
    case = problem(loss_fn=lambda m, b: m(b[0]).sum(1) * float("nan"), check=False, seed=1)
    silent = problem(loss_fn=lambda m, b: m(b[0]).sum(1) * 0.0, check=False, seed=1)
    train(case.private)
    train(silent.private)
    assert torch.equal(weights(case.model), weights(silent.model))
    assert torch.isfinite(weights(case.model)).all()


@pytest.mark.parametrize(
    "clip",
    one_fast(
        [
            PerLayer((0.3, 0.4)),
            Automatic(0.5),
            PerLayer((0.3, 0.4), noise="proportional"),
            Flat(0.5),
        ],
        2,
    ),
    ids=repr,
)
def test_noise_follows_the_clip_rule(problem, clip):
    setting = {"n": 8, "batch_size": 1, "n_records": 10**8, "check": False}
    case = problem(clip_norm=clip, lr=0.0, steps=300, seed=2, **setting)
    squares = {name: 0.0 for name, _ in case.model.named_parameters()}
    for lot in case.private:
        case.private.step(lot)
        for name, p in case.model.named_parameters():
            squares[name] += float((p.grad**2).mean()) / 300
    names = [name for name, _ in case.model.named_parameters()]
    for group, scale in zip(clip.groups(names), clip.noise_scales, strict=True):
        for name in group:
            assert squares[name] == pytest.approx(scale**2, rel=0.45)  # >= 600 draws: 7 sigma
    assert (
        sum((c / s) ** 2 for c, s in zip(clip.clip_norms, clip.noise_scales, strict=True))
        <= 1.0 + 1e-9
    )


# What is billed ---------------------------------------------------------------------------------


def test_the_event_is_the_run(problem):
    run = problem(steps=7, noise_multiplier=1.5).private
    step = ev.PoissonSampled(16 / 64, ev.Gaussian(1.5))
    assert run.event == ev.Repeated(step, 7)
    train(run)
    assert [entry.event for entry in run.ledger.history()] == [run.event]
    assert run.epsilon(delta=1e-5) == tacit.epsilon(run.event, delta=1e-5)


@pytest.mark.parametrize(("n", "epochs"), [(75, 100), (49, 3), (10, 1), (11, 0.5), (19_999, 1)])
def test_the_number_of_steps_is_whole_and_the_one_that_is_priced(n, epochs):
    """Peers, entry 14: int(1 / (1 / n)) is not n."""
    steps = count_steps(epochs=epochs, steps=None, batch_size=1, n_records=n)
    assert steps == -(-int(epochs * 2) * n // 2)
    assert isinstance(steps, int)


def test_a_tenth_of_an_epoch_is_not_rounded_up():
    assert count_steps(epochs=0.1, steps=None, batch_size=1, n_records=100) == 10
    assert count_steps(epochs=1 / 3, steps=None, batch_size=1, n_records=99) == 33


def test_realized_epsilon_is_within_the_target_and_near_it(problem):
    run = problem(n=75, batch_size=1, epochs=4, epsilon=2.0, delta=1e-5).private
    assert run.steps == 300
    assert 1.98 < run.epsilon(delta=1e-5) <= 2.0
    train(run)
    assert run.steps_taken == 300
    assert run.ledger.epsilon(delta=1e-5) <= 2.0


def test_other_releases_of_the_run_are_priced_with_it_and_paid_by_others(problem):
    features = ev.Gaussian(8.0)
    run = problem(epsilon=2.0, delta=1e-5, also=features).private
    assert run.event == ev.Sequence((features, run.training_event))
    assert 1.98 < run.epsilon(delta=1e-5) <= 2.0
    alone = problem(epsilon=2.0, delta=1e-5).private
    assert alone.event == alone.training_event
    assert run.noise_multiplier > alone.noise_multiplier
    train(run)
    assert [entry.event for entry in run.ledger.history()] == [run.training_event]
    with pytest.raises(ValueError, match=r"events in also alone are Gaussian"):
        problem(epsilon=0.5, delta=1e-5, also=[ev.Gaussian(1.0)])
    with pytest.raises(TypeError, match="also must hold events"):
        problem(also=[1.0])


def test_the_plan_is_reserved_before_the_first_release(problem):
    ledger = tacit.Ledger(budget=tacit.Budget(epsilon=0.01, delta=1e-6))
    case = problem(ledger=ledger)
    before = weights(case.model)
    lot = next(iter(case.private))
    with pytest.raises(BudgetExceeded):
        case.private.step(lot)
    assert torch.equal(weights(case.model), before)
    assert all(p.grad is None for p in case.model.parameters())
    assert ledger.history() == []
    assert case.private.steps_taken == 0


def test_making_a_run_spends_nothing(problem):
    run = problem().private
    assert run.ledger.history() == []
    iter(run)
    assert run.ledger.history() == []


def test_training_stops_at_the_planned_steps(problem):
    run = train(problem(steps=3).private)
    with pytest.warns(RuntimeWarning, match="this run is over"):
        assert list(run) == []
    assert len(run) == 3  # planned: a loop that resumes counts those taken, too
    assert len(run.ledger.history()) == 1


def test_without_noise_the_bill_says_so(problem):
    run = problem(noise_multiplier=0.0).private
    assert run.event == ev.NonPrivate()
    assert run.epsilon(delta=1e-5) == float("inf")


def test_other_samplers_carry_their_own_event(problem):
    fixed = sampling.FixedSize(16, n_records=64)
    ledger = tacit.Ledger(relation=tacit.Relation.REPLACE_ONE)
    run = problem(batch_size=fixed, ledger=ledger).private
    assert run.event == ev.Repeated(ev.FixedSizeSampled(16, 64, ev.Gaussian(1.0)), 4)
    assert all(sum(len(m.indices) for m in lot.pending()) == 16 for lot in _stepping(run))
    balls = problem(batch_size=sampling.RandomAllocation(4), steps=8).private
    assert balls.event == ev.Repeated(ev.RandomAllocation(4, ev.Gaussian(1.0)), 2)
    seen = [
        row
        for lot in _stepping(balls)
        for m in lot.pending()
        for row in m.fetch().batch[0][:, 0].tolist()
    ]
    assert len(seen) == 128
    assert len(set(seen[:64])) == 64  # every record once an epoch


def _stepping(run):
    for lot in run:
        yield lot
        run.step(lot)


@pytest.mark.parametrize(
    "sampler",
    [
        "shuffle",
        torch.utils.data.WeightedRandomSampler([1.0] * 64, 64),
        torch.utils.data.RandomSampler(range(64)),
    ],
    ids=["shuffle", "weighted", "random order"],
)
def test_orders_without_a_sound_price_are_refused(problem, sampler):
    """Peers, entries 16 and 17: weighted samplers, and shuffling priced as Poisson."""
    with pytest.raises(TypeError, match="refused"):
        problem(batch_size=sampler)


def test_shuffling_is_priced_without_amplification_or_not_at_all(problem):
    """Peers, entry 17."""
    with pytest.raises(UnsupportedEvent, match="no proved amplification"):
        _ = problem(batch_size=sampling.Shuffle(4, n_records=64)).private.event
    paid = sampling.Shuffle(4, n_records=64, unamplified=True)
    run = problem(batch_size=paid, steps=8).private
    assert run.epsilon(delta=1e-5) >= tacit.epsilon(ev.Repeated(ev.Gaussian(1.0), 2), delta=1e-5)


# The user's own objects -------------------------------------------------------------------------


def test_model_optimizer_and_scheduler_stay_the_users_own(problem):
    case = problem(momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(case.optimizer, 1, gamma=0.5)
    keys, kind, forward = list(case.model.state_dict()), type(case.model), case.model.forward
    attributes = [set(vars(m)) for m in case.model.modules()]
    on_parameters = [set(vars(p)) for p in case.model.parameters()]
    for lot in case.private:
        case.private.step(lot)
        scheduler.step()
    assert list(case.model.state_dict()) == keys
    assert type(case.model) is kind
    assert case.model.forward == forward
    assert [set(vars(m)) for m in case.model.modules()] == attributes
    assert [set(vars(p)) for p in case.model.parameters()] == on_parameters
    for module in case.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
    assert case.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4)
    assert "momentum_buffer" in case.optimizer.state[next(case.model.parameters())]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
        lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
        lambda p: torch.optim.Adagrad(p, lr=0.01),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
        lambda p: torch.optim.SGD(p, lr=0.01, nesterov=True, momentum=0.9, weight_decay=1e-3),
    ],
)
def test_any_optimizer_takes_the_step(problem, make):
    model = nn.Linear(4, 2)
    case = problem(model=model, optimizer=make(model.parameters()))
    before = weights(model)
    train(case.private)
    assert not torch.equal(weights(model), before)


def test_stale_gradients_of_frozen_parameters_do_not_move_them(problem):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    model[0].weight.grad = torch.full_like(model[0].weight, 100.0)
    frozen = model[0].weight.clone()
    train(problem(model=model).private)
    assert torch.equal(model[0].weight, frozen)


def test_double_precision_and_half_precision_parameters_work(problem):
    for dtype in (torch.float64, torch.bfloat16):
        model = nn.Linear(4, 2).to(dtype)
        x, y = torch.randn(64, 4, dtype=dtype), torch.arange(64) % 2
        case = problem(model=model, data=(x, y))
        train(case.private)
        assert model.weight.grad.dtype == dtype


def test_augmentations_are_averaged_before_clipping(problem):
    def flip(batch):
        x, y = batch
        sign = torch.tensor([1.0, -1.0]).repeat(len(x) // 2)
        return x * sign[:, None], y

    case = problem(
        batch_size=64, noise_multiplier=0.0, steps=1, augment=Views(2, flip), clip_norm=0.2
    )

    def averaged(model, row):
        x, y = row
        return (F.cross_entropy(model(x), y) + F.cross_entropy(model(-x), y)) / 2

    expected = clipped_mean(case.model, averaged, (case.x, case.y), 0.2, 64)
    train(case.private)
    for p, gradient in zip(case.model.parameters(), expected, strict=True):
        assert torch.allclose(p.grad, gradient, rtol=1e-4, atol=1e-7)


# Order, interrupts, misuse ----------------------------------------------------------------------


def test_breaking_off_and_going_on_merges_no_lots(problem):
    """Peers, entry 12: leaving the loop in mid-epoch left flags behind."""
    whole, broken = problem(seed=4, steps=6), problem(seed=4, steps=6)
    train(whole.private)
    for lot in broken.private:
        broken.private.step(lot)
        if broken.private.steps_taken == 2:
            break
    peeked = next(iter(broken.private))  # drawn, then dropped: the next loop draws it again
    assert peeked.step == 2
    train(broken.private)
    assert torch.equal(weights(broken.model), weights(whole.model))


def test_a_lot_that_is_skipped_stops_the_loop(problem):
    run = problem().private
    with pytest.raises(RuntimeError, match="Every lot is a step"):
        for _ in run:
            pass


def test_several_ranks_draw_a_lot_once(problem, monkeypatch):
    real, drawn = sampling.Poisson.indices, []
    monkeypatch.setattr(
        sampling.Poisson, "indices", lambda self, n, rng: drawn.append(n) or real(self, n, rng)
    )
    private = problem().private
    lots = private._lots
    lots._ranks = 2
    drawn.clear()  # sizes of lots were drawn to test isolation
    for step in range(private._plan.steps):
        lots.lot(step)
    assert len(drawn) == private._plan.steps


def test_only_the_lot_of_this_step_can_be_stepped_on(problem):
    case, other = problem(), problem()
    lot = next(iter(case.private))
    with pytest.raises(ValueError, match="another step or run"):
        other.private.step(lot)
    case.private.step(lot)
    with pytest.raises(ValueError, match="another step or run"):
        case.private.step(lot)
    with pytest.raises(TypeError, match="must come from"):
        case.private.step((case.x, case.y))


def test_a_step_that_fails_leaves_no_gradient_behind(problem, monkeypatch):
    # The last one's memory may hold the next sum, without noise.
    case = problem()
    lots = iter(case.private)
    case.private.step(next(lots))
    lot = next(lots)

    def fail(*_):
        raise BudgetExceeded("spent")

    monkeypatch.setattr(case.private._bill, "pay", fail)
    with pytest.raises(BudgetExceeded):
        case.private.step(lot)
    assert all(p.grad is None for p in case.model.parameters())


def test_ctrl_c_before_the_release_changes_nothing(problem, monkeypatch):
    case, twin = problem(seed=1), problem(seed=1)
    real = mapped.run

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(mapped, "run", interrupted)
    before = weights(case.model)
    lot = next(iter(case.private))
    with pytest.raises(KeyboardInterrupt):
        case.private.step(lot)
    assert torch.equal(weights(case.model), before)
    assert case.private.steps_taken == 0
    monkeypatch.setattr(mapped, "run", real)
    train(case.private)
    train(twin.private)
    assert torch.equal(weights(case.model), weights(twin.model))


def test_ctrl_c_during_the_release_waits_for_its_end(problem):
    model = nn.Linear(4, 2)

    class Interrupted(torch.optim.SGD):
        def step(self):
            os.kill(os.getpid(), signal.SIGINT)
            super().step()

    case = problem(model=model, optimizer=Interrupted(model.parameters(), lr=0.1))
    before = weights(model)
    lot = next(iter(case.private))
    with pytest.raises(KeyboardInterrupt):
        case.private.step(lot)
    assert case.private.steps_taken == 1
    assert not torch.equal(weights(model), before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"clip_norm": 0.0}, ValueError, "clip_norm"),
        ({"clip_norm": -1.0}, ValueError, "clip_norm"),
        ({"clip_norm": float("nan")}, ValueError, "clip_norm"),
        ({"epsilon": 1.0, "delta": 1e-5, "noise_multiplier": 1.0}, ValueError, "one of them"),
        ({"epsilon": None, "noise_multiplier": None}, ValueError, "one of them"),
        ({"epsilon": 1.0}, ValueError, "delta must be given"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier"),
        ({"epochs": 1, "steps": 2}, ValueError, "epochs or steps"),
        ({"steps": None}, ValueError, "epochs or steps"),
        ({"steps": 0}, ValueError, "steps"),
        ({"steps": 1.5}, TypeError, "steps"),
        ({"epochs": 0}, ValueError, "epochs"),
        ({"batch_size": 65}, ValueError, "batch_size must be <= n_records"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"n_records": 0}, ValueError, "n_records"),
        ({"max_microbatch": 0}, ValueError, "max_microbatch"),
        ({"num_workers": -1}, ValueError, "num_workers"),
        ({"seed": -1}, ValueError, "seed"),
        ({"batch_size": sampling.FixedSize(8, n_records=32)}, ValueError, "n_records is 64"),
        ({"batch_size": sampling.RandomAllocation(3)}, ValueError, "whole epochs"),
        ({"clip_norm": PerLayer((1.0,))}, ValueError, "clip_norms must have one entry"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_arguments_are_named(problem, options, error, message):
    with pytest.raises(error, match=message):
        train(problem(**options).private)


def test_views_are_at_least_one():
    with pytest.raises(ValueError, match="count"):
        Views(0)


def test_nothing_private_is_shown(problem):
    case = problem(seed=1)
    train(case.private)
    assert set(case.private.info) == {
        "step", "steps", "clip_norms", "noise_multiplier", "expected_batch", "n_records",
        "is_reproducible",
    }  # fmt: skip
    assert case.private._lots.key.secret.hex() not in repr(case.private)
    assert case.private.info["is_reproducible"]


def test_a_dropped_run_is_collected(problem):
    import weakref

    case = problem()
    reference = weakref.ref(case.private)
    train(case.private)
    del case
    gc.collect()
    assert reference() is None


def test_adaptive_clipping_is_billed_on_the_same_sample(problem):
    run = problem(clip_norm=AdaptiveClip(1.0, count_noise_std=5.0)).private
    inner = ev.Sequence((ev.Gaussian(1.0), ev.Gaussian(5.0 / 0.5)))
    assert run.event == ev.Repeated(ev.PoissonSampled(0.25, inner), 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, inside torch's compiler
def test_a_compiled_run_takes_the_same_steps(problem):
    options = {"seed": 3, "steps": 3, "clip_norm": ScheduledClip(1.0, Stairs((1.0, 0.5)))}
    plain, fast = problem(**options), problem(compile=True, **options)
    train(plain.private)
    train(fast.private)
    assert torch.allclose(weights(plain.model), weights(fast.model), atol=1e-5)


def test_what_cannot_be_compiled_is_refused(problem):
    with pytest.raises(ValueError, match="compile"):
        problem(compile=True, clip_norm=AdaptiveClip(PerLayer((1.0, 1.0))))


def test_a_run_refuses_to_be_copied(problem):
    run = problem().private
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            copied(run)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.int64, {"speed": Speed(max_microbatch=5)}),
        (torch.int32, {}),
        (torch.int64, {"arithmetic": "fast"}),
    ],
)
def test_a_run_with_a_large_table_releases_what_dense_sums_would(monkeypatch, kind, options):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(3))
            self.table = nn.Embedding(9000, 3, padding_idx=2)

        def forward(self, ids):
            return self.table(ids).sum(1) + self.bias

    data = torch.randint(0, 9000, (60, 4), generator=torch.Generator().manual_seed(0)).to(kind)
    found, sparse = [], []
    for may_be_sparse in (True, False):
        torch.manual_seed(0)
        model = Table()
        private = tacit.make_private(
            model, torch.optim.SGD(model.parameters(), lr=0.1), (data,),
            lambda model, batch: model(batch[0]).square().sum(1),
            batch_size=8, steps=4, clip_norm=0.1, noise_multiplier=0.5, seed=1,
            **with_speed({"check": False} | options),
        )  # fmt: skip
        monkeypatch.setattr(private._lot_sum, "_may_be_sparse", may_be_sparse)
        for lot in private:
            sparse.append(private._lot_sum(lot, private._clip())[0].sums["table.weight"].is_sparse)
            private.step(lot)
        found.append([p.detach().clone() for p in model.parameters()])
    assert sparse == [True] * 4 + [False] * 4
    assert all(map(torch.equal, *found))

"""The loop on a CUDA device: same sum as on the CPU, noise by its law, exact repetition."""

import copy

import numpy as np
import pytest
import torch
from scipy.stats import chi2, kstest
from torch import nn

from tacit.training import gpu
from tacit.training.engines import in_halves
from tacit.training.key import Key
from tacit.training.noise import NoisyMean
from tacit.training.records import Microbatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # raised inside the compiler
    pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor"),
]


def two_layers(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.2), nn.Linear(5, 2)).to(device)


def weights(model):
    return torch.cat([p.detach().flatten().cpu().clone() for p in model.parameters()])


def test_a_step_on_the_gpu_is_the_step_on_the_cpu(problem):
    found = []
    for device in ("cpu", "cuda"):
        case = problem(model=two_layers(device).eval(), noise_multiplier=0.0, steps=4, seed=1)
        for lot in case.private:
            case.private.step(lot)
        found.append(weights(case.model))
    assert torch.allclose(*found, atol=1e-5)


def test_gpu_noise_has_the_stated_law():
    """False-alarm probability 3e-6, a third each for variance, shape and correlation."""
    mean = NoisyMean(Key.fresh(), expected_batch=10.0)
    shapes, scales = [(1000, 100), (50,), (64, 3, 5, 7)], [0.5, 0.25, 1.0]
    draws = []
    for t in range(3):
        sums = [torch.full(shape, 7.0, device="cuda") for shape in shapes]
        sums[2] = sums[2].to(memory_format=torch.channels_last)
        released = mean.release(sums, scales, step=t, noise_multiplier=2.0)
        rescaled = [(v - 0.7) / (0.2 * s) for v, s in zip(released, scales, strict=True)]
        draws.append(torch.cat([v.flatten() for v in rescaled]).double().cpu().numpy())
    noise = draws[2]
    assert chi2.ppf(5e-7, noise.size) < (noise**2).sum() < chi2.isf(5e-7, noise.size)
    assert kstest(noise, "norm").pvalue > 1e-6
    assert abs((draws[1] * noise).sum()) < 4.9 * noise.size**0.5  # steps are independent
    assert len(np.unique(noise)) > 0.99 * noise.size  # no two places share a draw


def test_a_compiled_lot_in_several_batches_is_the_eager_one(problem):
    options = {"noise_multiplier": 0.0, "steps": 3, "seed": 1, "max_microbatch": 4}
    plain = problem(model=two_layers("cuda").eval(), **options)
    fast = problem(model=two_layers("cuda").eval(), compile=True, **options)
    for case in (plain, fast):
        for lot in case.private:
            case.private.step(lot)
    assert torch.allclose(weights(plain.model), weights(fast.model), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 100, 70, 33), (2, 512, 768, 2304), (2, 200, 64, 4096)])
def test_fused_gram_norms_are_the_norms(dtype, shape):
    n, positions, inputs, outputs = shape
    a = torch.randn(n, positions, inputs, device="cuda").to(dtype)
    g = torch.randn(n, positions, outputs, device="cuda").to(dtype)
    wanted = torch.bmm(g.double().transpose(1, 2), a.double()).square().sum((1, 2))
    found, lengths = (t.double() for t in gpu.gram_norms(a, g))
    assert ((found - wanted) / wanted).abs().max() < 1e-5
    bound = (a.double().norm(dim=2) * g.double().norm(dim=2)).sum(1)
    assert (lengths >= bound * (1 - 1e-4)).all()
    assert (lengths <= bound * 10).all()


def test_weighted_sums_leave_out_rows_of_factor_zero():
    values = torch.randn(100, 3001, device="cuda").bfloat16()
    values[7] = torch.nan
    factors = torch.rand(100, device="cuda")
    factors[7] = 0.0
    wanted = factors.double() @ values.double().nan_to_num()
    assert torch.allclose(gpu.weighted_sum(values, factors).double(), wanted, atol=1e-5)


def test_weighted_sums_take_rows_in_any_layout():
    values = torch.randn(300, 24, device="cuda").bfloat16().t()  # (24, 300), not contiguous
    factors = torch.rand(24, device="cuda")
    wanted = factors.double() @ values.double()
    assert torch.allclose(gpu.weighted_sum(values, factors).double(), wanted, atol=1e-4)


def test_steps_are_repeated_bit_for_bit(problem):
    torch.use_deterministic_algorithms(True)
    try:
        first = problem(model=two_layers("cuda"), steps=4)
        state = first.private.state_dict()
        second = problem(model=two_layers("cuda"), steps=4)
        second.private.load_state_dict(state)
        for case in (first, second):
            for lot in case.private:
                case.private.step(lot)
        assert torch.equal(weights(first.model), weights(second.model))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_resumed_run_repeats_its_steps_bit_for_bit(problem):
    """Also where the first run's steps were recorded and the second's are launched."""
    options = {"steps": 30, "momentum": 0.9, "max_microbatch": 4}
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (problem(model=two_layers("cuda"), **options) for _ in range(2))
        saved = []
        for step, lot in enumerate(first.private, 1):
            first.private.step(lot)
            if step == 15:
                parts = (first.private, first.model, first.optimizer)
                saved = [copy.deepcopy(part.state_dict()) for part in parts]
        parts = (second.private, second.model, second.optimizer)
        for part, state in zip(parts, saved, strict=True):
            part.load_state_dict(state)
        for lot in second.private:
            second.private.step(lot)
        assert graphs_of(first)
        assert torch.equal(weights(first.model), weights(second.model))
    finally:
        torch.use_deterministic_algorithms(False)


def test_repetition_without_determinism_is_warned_of(problem):
    case = problem(model=two_layers("cuda"))
    with pytest.warns(UserWarning, match="bit for bit"):
        case.private.load_state_dict(case.private.state_dict())
    case.private.load_state_dict(case.private.state_dict(), lost_steps=0)


def test_a_real_out_of_memory_halves_the_batch():
    free = torch.cuda.mem_get_info()[0]
    row = free // 8  # four rows at once do not fit three times

    def compute(micro):
        kept = [torch.empty(len(micro.batch[0]) * row, dtype=torch.uint8, device="cuda")]
        kept.append(torch.empty_like(kept[0]))
        return len(kept[0]) // row

    heard = []
    parts = in_halves(compute, Microbatch((torch.zeros(8),), None), on_halved=heard.append)
    assert sum(parts) == 8
    assert heard
    torch.cuda.empty_cache()


def test_compiled_steps_are_the_steps(problem):
    options = {"noise_multiplier": 0.0, "steps": 3, "seed": 1}
    plain = problem(model=two_layers("cuda").eval(), **options)
    fast = problem(model=two_layers("cuda").eval(), compile=True, **options)
    for case in (plain, fast):
        for lot in case.private:
            case.private.step(lot)
    assert torch.allclose(weights(plain.model), weights(fast.model), atol=1e-5)


def run_with_changes(problem, optimizer_of, *, is_watched):
    """40 noisy steps; the optimizer's rate, settings and state change on the way."""
    model = two_layers("cuda").eval()
    optimizer = optimizer_of(model)
    case = problem(model=model, optimizer=optimizer, steps=40, seed=1, compile=True)
    if is_watched:  # then it is called at every step
        optimizer.register_step_post_hook(lambda *_: None)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 14, gamma=0.5)
    gradients, recorded = [], []
    for step, lot in enumerate(case.private):
        case.private.step(lot)
        gradients.append(model[0].weight.grad.clone())
        recorded.append(bool(graphs_of(case)))
        scheduler.step()
        if step == 22:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if step == 28:
            optimizer.param_groups[-1]["weight_decay"] = 0.1
    return weights(model), torch.stack(gradients).flatten(1), recorded


def groups(model, **settings):
    return [{"params": model[0].parameters()}, {"params": model[2].parameters(), **settings}]


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(groups(m, lr=0.05), lr=0.1, momentum=0.9),
    "nesterov": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1, capturable=True),
    "adamw": lambda m: torch.optim.AdamW(
        groups(m, betas=(0.8, 0.9)), lr=0.01, capturable=True, fused=True
    ),
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, amsgrad=True, capturable=True),
}


@pytest.mark.filterwarnings("ignore:.*capturable")  # of the steps before the recorded ones
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_recorded_releases_and_updates_are_those_of_the_optimizer(problem, kind):
    moved, gradients, recorded = run_with_changes(problem, OPTIMIZERS[kind], is_watched=False)
    wanted, wanted_gradients, never = run_with_changes(problem, OPTIMIZERS[kind], is_watched=True)
    assert not any(never)
    assert recorded[12]
    assert recorded[15] == (kind != "amsgrad")  # our own update follows a schedule
    assert recorded[21] or kind == "amsgrad"
    assert torch.allclose(gradients, wanted_gradients, atol=1e-5)
    assert torch.allclose(moved, wanted, atol=1e-5)
    assert len(gradients.unique(dim=0)) == 40  # the noise is new at every replay


def graphs_of(case):
    launches = case.private._replayed._launches.values()
    return {each.graph for each in launches} - {None}


@pytest.mark.parametrize("is_compiled", [True, False])
def test_what_follows_a_lot_in_parts_is_recorded_once(problem, is_compiled):
    case = problem(
        model=two_layers("cuda").eval(), steps=40, seed=1, momentum=0.9, compile=is_compiled,
        max_microbatch=4,
    )  # fmt: skip
    graphs = set()
    for lot in case.private:
        case.private.step(lot)
        graphs |= graphs_of(case)
    assert len(graphs) == 1


def test_lots_of_one_and_of_two_parts_are_both_recorded(problem):
    runs = []
    for is_watched in (False, True):
        case = problem(
            model=two_layers("cuda").eval(), steps=60, seed=1, momentum=0.9, compile=True,
            max_microbatch=16,
        )  # fmt: skip
        if is_watched:
            case.optimizer.register_step_post_hook(lambda *_: None)
        parts = set()
        for lot in case.private:
            parts.add(len(list(lot.pending())))
            case.private.step(lot)
        assert parts == {1, 2}
        assert len(graphs_of(case)) == (0 if is_watched else 2)
        runs.append(weights(case.model))
    assert torch.allclose(*runs, atol=1e-5)


def test_rows_fetched_by_the_graph_are_the_rows(problem):
    """Lots of all sizes, the host far ahead of the device."""
    found = []
    for on_gpu in (True, False):
        case = problem(
            model=two_layers("cuda").eval(), noise_multiplier=0.0, steps=60, seed=1, compile=True,
            data=tuple(t.cuda() if on_gpu else t for t in fixed_data()),
        )  # fmt: skip
        torch.cuda._sleep(10**8)
        for lot in case.private:
            case.private.step(lot)
        found.append(weights(case.model))
    assert torch.allclose(*found, atol=1e-6)


def fixed_data():
    generator = torch.Generator().manual_seed(5)
    y = torch.arange(64) % 2
    return torch.randn(64, 4, generator=generator) + 2.0 * y[:, None], y


def test_a_step_that_is_not_finite_is_masked_in_the_graph_and_outside(problem, monkeypatch):
    from tacit.training.gpu import compiled

    found = []
    for cheap in (0, 2**28):
        monkeypatch.setattr(compiled, "_CHEAP_TO_MASK", cheap)
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(3))
        x[::5] = torch.nan
        data = (x.cuda(), (torch.arange(64) % 2).cuda())
        options = {"noise_multiplier": 0.0, "steps": 12, "seed": 1, "data": data}
        case = problem(model=two_layers("cuda").eval(), compile=True, **options)
        for lot in case.private:
            case.private.step(lot)
        found.append(weights(case.model))
    plain = problem(model=two_layers("cuda").eval(), **options)
    for lot in plain.private:
        plain.private.step(lot)
    assert torch.isfinite(weights(plain.model)).all()
    for each in found:
        assert torch.allclose(each, weights(plain.model), atol=1e-5)

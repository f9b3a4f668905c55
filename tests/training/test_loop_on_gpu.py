"""The loop on a CUDA device: same sum as on the CPU, noise by its law, restarts."""

import copy

import numpy as np
import pytest
import torch
import triton_emulation
from scipy.stats import chi2, kstest, norm, poisson
from torch import nn

import tacit
from tacit.training.lot_sum import in_halves
from tacit.training.lots.records import Microbatch
from tacit.training.noise.grid_noise import make_grids
from tacit.training.noise.key import Key
from tacit.training.noise.noisy_mean import NoisyMean

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


def test_gpu_noise_lies_on_the_grid_and_is_the_same_whatever_the_sum():
    multiplier, shapes = 2.0, [(1000, 100), (77,)]
    grids = make_grids(multiplier, [0.5, 8.0], 100_077)
    rng = np.random.default_rng(0)

    def released(sums):
        mean = NoisyMean(Key.from_seed(1), expected_batch=1.0)
        sums = [torch.tensor(s, dtype=torch.float32, device="cuda") for s in sums]
        found = mean.release(sums, [0.5, 8.0], step=3, noise_multiplier=multiplier)
        return [v.double().cpu().numpy() / g.step for v, g in zip(found, grids, strict=True)]

    zero = released([np.zeros(shape) for shape in shapes])
    for values in zero:
        small = np.abs(values) < 2**24  # float32 has all their bits
        assert np.array_equal(np.rint(values), values)
        assert small.any()
    # Shifts by whole steps shift the release by as much, up to the rounding to float32.
    whole = [rng.integers(-(2**20), 2**20, shape) for shape in shapes]
    moved = released([w * g.step for w, g in zip(whole, grids, strict=True)])
    for before, after, shift in zip(zero, moved, whole, strict=True):
        gap = np.spacing(np.maximum(np.abs(before), np.abs(after)).astype(np.float32))
        assert (np.abs(after - before - shift) <= 2 * np.maximum(1, gap)).all()


def test_gpu_noise_is_that_of_the_emulated_kernel(monkeypatch):
    """Bit for bit in the words, and in the integers up to fused products at the edge of a cell."""
    key, count, multiplier = Key.from_seed(5), 5000, 1.0
    mean = NoisyMean(key, expected_batch=1.0)
    (found,) = mean.release(
        [torch.zeros(count, device="cuda")], [1.0], step=2, noise_multiplier=multiplier
    )
    (grid,) = make_grids(multiplier, [1.0], count)
    kernel = triton_emulation.emulated(monkeypatch)
    secret = np.frombuffer(key.bytes("noise on a GPU", 0, 32), np.int32)
    nonce = int.from_bytes(key.bytes("nonce", 2, 8), signed=True)
    lanes = kernel.LANES
    blocks = -(-count // (8 * lanes))
    with np.errstate(over="ignore"):
        z = kernel.normals(
            triton_emulation.Pointer(secret),
            triton_emulation.lanes(nonce, np.int64),
            triton_emulation.lanes(np.arange(blocks * lanes), np.int64),
            12,
        )
    expected = np.array(z).reshape(8, blocks, lanes).swapaxes(0, 1).reshape(-1)[:count]
    steps = np.rint(expected * grid.noise_steps)
    error = np.abs(found.double().cpu().numpy() / grid.step - steps)
    assert (error <= 1 + np.spacing(np.abs(steps).astype(np.float32))).all()


@pytest.mark.parametrize("secure", [False, True])
def test_gpu_noise_is_normal_in_the_body_and_beyond_5_6_and_7_deviations(secure):
    """1.6e9 numbers: 920 beyond 5 deviations, 3.2 beyond 6; false-alarm probability 1e-5."""
    mean, size, rounds = NoisyMean(Key.fresh(), expected_batch=1.0, secure=secure), 1 << 27, 12
    counts, cells = dict.fromkeys((4.0, 5.0, 6.0, 7.0), 0), torch.zeros(200, device="cuda")
    edges = torch.tensor(norm.ppf(np.arange(1, 200) / 200), dtype=torch.float32, device="cuda")
    for step in range(rounds):
        total = [torch.zeros(size, device="cuda")]
        (z,) = mean.release(total, [1.0], step=step, noise_multiplier=1.0)
        for beyond in counts:
            counts[beyond] += int((z.abs() > beyond).sum())
        if step == 0:
            cells += torch.bincount(torch.bucketize(z, edges), minlength=200)
    for beyond, found in counts.items():
        expected = rounds * size * 2 * norm.sf(beyond)
        assert poisson.ppf(1e-6, expected) <= found <= poisson.isf(1e-6, expected)
    statistic = float((((cells.double() - size / 200) ** 2).sum() / (size / 200)).cpu())
    assert chi2.ppf(5e-7, 199) < statistic < chi2.isf(5e-7, 199)


def test_an_attacker_who_learned_the_low_bits_of_gpu_noise_is_no_better():
    """An attack on the GPU path: likelihoods of low bits, learned from 2.7e8 draws of the kernel.

    Two sums at distance 1 spread over 1,000 weights, noise multiplier 10, 1,000 trials; the best
    possible accuracy is Phi(1 / 20). The old float32 noise has empty cells, which this would find.
    """
    weights, sigma, bits, trials = 1000, 10.0, 14, 1000
    (grid,) = make_grids(sigma, [1.0], weights)
    mean = NoisyMean(Key.fresh(), expected_batch=1.0)

    def steps_of(sums, step):
        (found,) = mean.release([sums], [1.0], step=step, noise_multiplier=sigma)
        return torch.round(found.double() / grid.step).long()

    table = torch.zeros(2 * 2**bits, device="cuda", dtype=torch.float64)

    def features(noise):
        """Sign, and low bits above those that rounding to float32 sets to zero."""
        zeros = torch.log2(noise.abs().double().clamp(min=2.0**24)).floor().long() - 23
        return ((noise >> zeros) & (2**bits - 1)) + 2**bits * (noise < 0)

    for step in range(270):  # noise of sums of this dimension, as many weights at once as fit
        block = torch.zeros(weights, 1000, device="cuda")
        (found,) = NoisyMean(Key.from_seed(step), expected_batch=1.0).release(
            [block], [1.0], step=0, noise_multiplier=sigma
        )
        table += torch.bincount(
            features(torch.round(found.double() / grid.step).long()).flatten(), minlength=len(table)
        )
    log_share = torch.log((table + 0.5) / table.sum())
    generator, right = torch.Generator("cuda").manual_seed(1), 0
    for trial in range(trials):
        first = torch.randn(weights, device="cuda", generator=generator)
        step = torch.randn(weights, device="cuda", generator=generator)
        sums = [first, first + 0.999 * step / step.norm()]
        truth = trial % 2
        whole = [torch.round(s.double() / grid.step).long() for s in sums]
        seen = steps_of(sums[truth].clone(), trial)
        score = [
            log_share[features(seen - w)].sum()
            - 0.5 * ((seen - w).double() / grid.noise_steps).square().sum()
            for w in whole
        ]
        right += int(score[1] > score[0]) == truth
    best = norm.cdf(1 / (2 * sigma))
    # Learned shares carry noise of their own: they may lower the accuracy, never raise it.
    assert right / trials < best + 4.0 * (best * (1 - best) / trials) ** 0.5


def test_a_compiled_lot_in_several_batches_is_the_eager_one(problem):
    options = {"noise_multiplier": 0.0, "steps": 3, "seed": 1, "max_microbatch": 4}
    plain = problem(model=two_layers("cuda").eval(), **options)
    fast = problem(model=two_layers("cuda").eval(), compile=True, **options)
    for case in (plain, fast):
        for lot in case.private:
            case.private.step(lot)
    assert torch.allclose(weights(plain.model), weights(fast.model), atol=1e-5)


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


@pytest.mark.parametrize("kind", ["momentum", "adamw", "amsgrad"])
def test_sum_noise_and_update_in_one_graph_are_those_one_after_the_other(problem, kind):
    """Lots of all sizes, each with a graph of its own; the rate changes on the way."""
    found, released = [], []
    for is_watched in (False, True):
        model = two_layers("cuda").eval()
        optimizer = OPTIMIZERS[kind](model)
        data = tuple(t.cuda() for t in fixed_data())
        case = problem(model=model, optimizer=optimizer, data=data, steps=80, seed=1, compile=True)
        if is_watched:
            optimizer.register_step_post_hook(lambda *_: None)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40, gamma=0.5)
        gradients = []
        for lot in case.private:
            case.private.step(lot)
            gradients.append(model[0].weight.grad.clone())
            scheduler.step()
        (graphs,) = case.private._lot_sum._compiled._graphs.values()
        followed = [run for run, _ in graphs.of_rows.values() if run._followed is not None]
        assert (not followed) == is_watched
        assert all(run._followed[1] is not None for run in followed)
        assert case.private.ledger.history()[0].kind == "plan"
        found.append(weights(model))
        released.append(torch.stack(gradients).flatten(1))
    assert torch.allclose(*released, atol=1e-5)
    assert torch.allclose(*found, atol=1e-5)
    assert len(released[0].unique(dim=0)) == 80  # the noise is new at every replay


def test_a_loop_that_leaves_the_losses_to_loss_fn_takes_the_same_steps(problem):
    found = []
    for is_own in (True, False):
        case = problem(model=two_layers("cuda").eval(), steps=30, seed=1, compile=True)
        for lot in case.private:
            if is_own:
                case.private.step(lot)
                continue
            case.private.backward()
            case.optimizer.step()
            case.optimizer.zero_grad()
        found.append(weights(case.model))
    assert torch.allclose(*found, atol=1e-5)


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


def test_a_resumed_run_finishes_within_its_budget(problem, tmp_path):
    """Also where the first run's steps were recorded and the second's are launched."""
    options = {"steps": 130, "momentum": 0.9, "max_microbatch": 4, "epsilon": 2.0, "delta": 1e-5}
    ledger = tacit.Ledger(tmp_path / "a", tacit.Budget(epsilon=2.0, delta=1e-5))
    options |= {"ledger": ledger, "checkpoint": tmp_path / "last.pt"}
    first = problem(model=two_layers("cuda"), **options)
    for lot in first.private:
        first.private.step(lot)
        if first.private.steps_taken == 61:
            break
    first.private._bill.writer.wait()
    with pytest.warns(UserWarning, match="out of the reserve"):
        second = problem(model=two_layers("cuda"), **options)
    for lot in second.private:
        second.private.step(lot)
    assert (second.private.steps_taken, len(ledger.history())) == (130, 1)

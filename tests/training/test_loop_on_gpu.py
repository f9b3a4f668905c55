"""The loop on a CUDA device: same sum as on the CPU, noise by its law, exact repetition."""

import pytest
import torch
from scipy.stats import chi2
from torch import nn

from tacit.training.memory import in_pieces
from tacit.training.noise import Key, NoisyMean
from tacit.training.records import Micro

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
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


def test_gpu_noise_has_the_stated_variance():
    """False-alarm probability 1e-6."""
    mean = NoisyMean(Key.fresh(), expected_batch=10.0)
    zeros = [torch.zeros(1000, 100, device="cuda"), torch.zeros(50, device="cuda")]
    draws = []
    for t in range(3):
        released = mean.release(zeros, [0.5, 0.5], step=t, noise_multiplier=2.0)
        draws.append(torch.cat([value.flatten() for value in released]))
    assert not torch.equal(draws[0], draws[2])
    noise = draws[2].double().cpu().numpy() / 0.1
    assert chi2.ppf(5e-7, noise.size) < (noise**2).sum() < chi2.isf(5e-7, noise.size)


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
    parts = in_pieces(compute, Micro((torch.zeros(8),), None), on_halved=heard.append)
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

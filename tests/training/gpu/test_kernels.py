"""Each fused kernel beside plain arithmetic: on a GPU, and by Triton's interpreter without one."""

import numpy as np
import pytest
import torch
import triton_emulation
import triton_kernels
from torch.nn import functional as F

from tacit.mechanisms import optimal_bands
from tacit.training.grid_noise import make_grids

BANDS = tuple(optimal_bands(48, 4))


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request):
    """The device of a test: on the CPU, kernels are interpreted."""
    if request.param == "cuda":
        yield request.param
        return
    pytest.importorskip("triton", reason="kernels need Triton")
    with triton_kernels.interpreted():
        yield request.param


def sized(device, large, small):
    """Return `large` on a GPU, and `small` for the interpreter, which is slow."""
    return large if device == "cuda" else small


SHAPES = [(3, 100, 70, 33), (2, 512, 768, 2304), (2, 200, 64, 4096)]
FEW = [(3, 20, 70, 33), (2, 140, 72, 96), (1, 130, 64, 640)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", range(3))
def test_fused_gram_norms_are_the_norms(device, case, dtype, monkeypatch):
    from tacit.training.gpu.gram import gram_norms

    if device == "cpu":  # of a GPU with a copy engine
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    n, positions, inputs, outputs = sized(device, SHAPES, FEW)[case]
    a = torch.randn(n, positions, inputs, device=device).to(dtype)
    g = torch.randn(n, positions, outputs, device=device).to(dtype)
    wanted = torch.bmm(g.double().transpose(1, 2), a.double()).square().sum((1, 2))
    found, lengths = (t.double() for t in gram_norms(a, g))
    assert ((found - wanted) / wanted).abs().max() < 1e-5
    bound = (a.double().norm(dim=2) * g.double().norm(dim=2)).sum(1)
    assert (lengths >= bound * (1 - 1e-4)).all()
    assert (lengths <= bound * 10).all()


CONVOLUTIONS = [
    # channels, outputs, size, kernel, stride, padding
    (3, 5, 9, (3, 3), 1, 1),
    (20, 17, 7, (3, 2), 2, 1),
    (1, 16, 11, (5, 5), 2, 0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_fused_gradients_of_convolutions_are_the_gradients(device, case, dtype):
    from tacit.training.gpu.conv_norms import conv2d_instances, conv2d_norms

    inputs, outputs, size, kernel, stride, padding = case
    x = torch.randn(4, inputs, size, size, device=device).to(dtype)
    weight = torch.zeros(outputs, inputs, *kernel, dtype=torch.float64, requires_grad=True)
    out = [F.conv2d(image[None].double().cpu(), weight, stride=stride, padding=padding)
           for image in x]  # fmt: skip
    g = torch.randn(4, *out[0].shape[1:], device=device).to(dtype)
    wanted = torch.stack([
        torch.autograd.grad(o, weight, one[None].double().cpu())[0]
        for o, one in zip(out, g, strict=True)
    ])  # fmt: skip
    squared, lengths = conv2d_norms(x, g, list(kernel), stride, padding)
    exact = wanted.square().sum((1, 2, 3, 4))
    torch.testing.assert_close(squared.double().cpu(), exact, rtol=1e-5, atol=0.0)
    assert (lengths.double().cpu() >= exact.sqrt() * (1 - 1e-5)).all()
    for views in (1, 2):
        found, norms = conv2d_instances(x, g, list(kernel), stride, padding, examples=4 // views)
        assert found.dtype == dtype
        found = found.permute(0, 1, 4, 2, 3).double().cpu()
        ours = wanted.unflatten(0, (-1, views)).sum(1)
        unit = 2e-5 if dtype == torch.float32 else 2.0**-8
        assert float((found - ours).norm()) <= unit * float(ours.norm())
        kept = found.square().sum((1, 2, 3, 4))
        torch.testing.assert_close(norms.double().cpu(), kept, rtol=1e-5, atol=0.0)


def test_weighted_sums_leave_out_rows_of_factor_zero(device):
    from tacit.training.gpu.weighted_rows import weighted_sum

    values = torch.randn(100, sized(device, 3001, 601), device=device).bfloat16()
    values[7] = torch.nan
    factors = torch.rand(100, device=device)
    factors[7] = 0.0
    wanted = factors.double() @ values.double().nan_to_num()
    assert torch.allclose(weighted_sum(values, factors).double(), wanted, atol=1e-5)


def test_weighted_sums_take_rows_in_any_layout(device):
    from tacit.training.gpu.weighted_rows import weighted_sum

    values = torch.randn(300, 24, device=device).bfloat16().t()  # (24, 300), not contiguous
    factors = torch.rand(24, device=device)
    wanted = factors.double() @ values.double()
    assert torch.allclose(weighted_sum(values, factors).double(), wanted, atol=1e-4)


MANY = [(1, 1), (7, 300), (3, 1_000_003), (70_000, 130)]
SOME = [(1, 1), (7, 300), (2, 40_003), (70, 130)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", range(4))
def test_formed_gradients_are_squared_and_summed_in_double_precision(device, case, dtype):
    from tacit.training.gpu.weighted_rows import row_squares, weighted_sum

    shape = sized(device, MANY, SOME)[case]
    values = (torch.randn(shape, device=device) * 3).to(dtype)
    factors = torch.rand(shape[0], device=device)
    wanted = values.double().square().sum(1)
    found = row_squares(values)
    assert found.dtype == torch.float64
    assert ((found - wanted) / wanted).abs().max() < 130 * 2.0**-24
    exact = factors.double() @ values.double()
    total = weighted_sum(values, factors.double(), double=True)
    assert total.dtype == torch.float64
    assert float((total - exact).norm()) <= 1e-14 * shape[0] * float(exact.norm() + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_rows_are_taken_and_the_rest_is_zero(device, dtype):
    from tacit.training.gpu.take_rows import take_rows

    data = (10 * torch.randn(50, 3, 7, device=device)).to(dtype)
    for room, count in ((8, 5), (8, 8), (8, 0), (1, 1), (700, 699)):
        rows = torch.randint(0, 50, (room,), device=device)
        wanted = torch.cat([rows, torch.tensor([count], device=device)])
        target = torch.ones(room, 3, 7, device=device).to(dtype)
        mask = torch.zeros(room, dtype=torch.bool, device=device)
        take_rows(data, wanted, target, mask)
        assert torch.equal(target[:count], data[rows[:count]])
        assert not target[count:].any()
        assert mask.tolist() == [place < count for place in range(room)]


SECRET = bytes(range(7, 39))
SIZES = (70, 2051)  # of the tensors: one program, and two
FACTOR = 0.25


def blocks_of(tensors, rounds=12, **banded):
    """Return blocks under a fixed key, and the grids of the tensors."""
    from tacit.training.gpu.banded_blocks import BandedBlocks
    from tacit.training.gpu.noise import Blocks

    grids = make_grids(1.5, [1.0, 4.0], sum(SIZES))
    made = (BandedBlocks if banded else Blocks)(tensors, grids, FACTOR, rounds, **banded)
    made.set_nonce(SECRET, 2**40 + 3)
    return made, grids


def wholes(grids, monkeypatch, rounds=12):
    """Return the noise in steps of the grids, by the kernel's arithmetic in numpy."""
    kernel = triton_emulation.emulated(monkeypatch)
    lanes = kernel.LANES
    counts = [-(-size // (8 * lanes)) for size in SIZES]
    with np.errstate(over="ignore"):
        z = kernel.normals(
            triton_emulation.Pointer(np.frombuffer(SECRET, np.int32)),
            triton_emulation.lanes(2**40 + 3, np.int64),
            triton_emulation.lanes(np.arange(sum(counts) * lanes), np.int64),
            rounds,
        )
    drawn = np.array(z).reshape(8, -1, lanes).swapaxes(0, 1).reshape(-1, 8 * lanes)
    parts = np.split(drawn, np.cumsum(counts)[:-1])
    return [
        np.rint(part.reshape(-1)[:size] * grid.noise_steps)
        for part, size, grid in zip(parts, SIZES, grids, strict=True)
    ]


def assert_released(tensors, expected, grids):
    """Compare as float32: a GPU fuses products with sums, so a number may be one step away."""
    for tensor, whole, grid in zip(tensors, expected, grids, strict=True):
        found = tensor.double().cpu().numpy() / (grid.step * FACTOR)
        slack = 0.0 if tensor.device.type == "cpu" else 1.0
        assert (np.abs(found - whole) <= slack + np.spacing(np.abs(whole).astype(np.float32))).all()


@pytest.mark.parametrize("rounds", [12, 20])
def test_released_sums_lie_on_their_grids_under_the_noise_of_key_and_nonce(
    device, rounds, monkeypatch
):
    torch.manual_seed(0)
    sums = [30 * torch.randn(n) for n in SIZES]
    tensors = [t.to(device, copy=True) for t in sums]
    blocks, grids = blocks_of(tensors, rounds)
    blocks.launch()
    noise = wholes(grids, monkeypatch, rounds)
    expected = [
        np.rint(s.double().numpy() / g.step) + n for s, g, n in zip(sums, grids, noise, strict=True)
    ]
    assert_released(tensors, expected, grids)


def test_a_banded_release_mixes_earlier_residuals_and_keeps_its_own(device, monkeypatch):
    torch.manual_seed(0)
    sums = [30 * torch.randn(n) for n in SIZES]
    tensors = [t.to(device, copy=True) for t in sums]
    residuals = torch.randint(-(2**27), 2**27, (len(BANDS) - 1, sum(SIZES)), dtype=torch.int32)
    kept = residuals.to(device, copy=True)
    units = [2.0**-22, 2.0**-20]
    options = {"column": BANDS, "units": units, "expected_batch": 1 / FACTOR}
    blocks, grids = blocks_of(tensors, residuals=kept, **options)
    step = 7  # row 1 of 3 is the newest; the one before is row 0
    blocks.set_step(step)
    blocks.launch()
    noise = wholes(grids, monkeypatch)
    rows = [residuals[(step - lag) % 3].double().numpy() for lag in (1, 2, 3)]
    past = sum(weight * row for weight, row in zip(BANDS[1:], rows, strict=True))
    expected, begin = [], 0
    for total, unit, grid, drawn in zip(sums, units, grids, noise, strict=True):
        inside = slice(begin, begin := begin + len(total))
        mixed = BANDS[0] * total.double().numpy() + unit * past[inside]
        expected.append(np.rint(mixed / grid.step) + drawn)
    assert_released(tensors, expected, grids)
    mean = torch.cat([t.double().cpu() for t in tensors])
    unit = torch.cat(
        [torch.full((n,), u, dtype=torch.float64) for n, u in zip(SIZES, units, strict=True)]
    )
    newest = ((torch.cat(sums).double() - mean / FACTOR) / unit).trunc()
    assert torch.equal(kept[step % 3].cpu().double(), newest)
    assert torch.equal(kept[[0, 2]].cpu(), residuals[[0, 2]])


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.99)),
}


QUICK = {("nesterov", True), ("adam", False)}  # of the interpreter


@pytest.mark.parametrize(
    ("kind", "is_banded"),
    [
        pytest.param(kind, is_banded, marks=[] if (kind, is_banded) in QUICK else pytest.mark.slow)
        for kind in OPTIMIZERS
        for is_banded in (False, True)
    ],
)
def test_the_fused_update_is_the_release_and_then_the_optimizer(device, kind, is_banded):
    from tacit.training.gpu.update import Update, can_update

    sums = [30 * torch.randn(n, device=device) for n in SIZES]
    ends = []
    for is_fused in (True, False):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(n).to(device)) for n in SIZES]
        optimizer = OPTIMIZERS[kind](weights)
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = device == "cuda"
        for weight in weights:
            weight.grad = torch.randn(weight.shape).to(device)
        optimizer.step()  # makes the state
        tensors = [total.clone() for total in sums]
        options = {}
        if is_banded:
            size = (len(BANDS) - 1, sum(SIZES))
            options = {"column": BANDS, "units": [2.0**-22] * 2, "expected_batch": 1 / FACTOR}
            options["residuals"] = torch.ones(size, dtype=torch.int32, device=device)
        blocks, _ = blocks_of(tensors, **options)
        if is_banded:
            blocks.set_step(5)
        if is_fused:
            assert can_update(tensors, weights, optimizer)
            update = Update(blocks, weights, optimizer)
            update.set_rates()
            update.launch(blocks)
            release = torch.cat(tensors)
        else:
            blocks.launch()
            release = torch.cat(tensors)  # on a GPU, torch's Nesterov step writes into gradients
            for weight, total in zip(weights, tensors, strict=True):
                weight.grad = total
            optimizer.step()
        ends.append((torch.cat([w.detach() for w in weights]), release))
    assert torch.equal(ends[0][1], ends[1][1])  # what is released
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-6, atol=1e-6)

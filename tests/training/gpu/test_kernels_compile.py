"""Every fused kernel is compiled for an H200, as training launches it, and fits that GPU.

No GPU is needed: Triton brings NVIDIA's assembler.
"""

import pytest
import torch
import triton_kernels

from tacit.mechanisms import optimal_bands
from tacit.training.grid_noise import make_grids

pytest.importorskip("triton", reason="kernels need Triton")

SHARED = 227 * 1024  # bytes of one program, on compute capability 9.0
SPILLED = 64  # bytes of a thread that cost little
SECONDS = 5.0  # of a kernel that the first step waits for
N = 5000


def gram(dtype, T, D, P):
    from tacit.training.gpu.gram import gram_norms

    a, g = torch.empty(2, T, D, dtype=dtype), torch.empty(2, T, P, dtype=dtype)
    return lambda: gram_norms(a, g)


def conv(dtype, inputs, outputs, size, examples=0):
    from tacit.training.gpu.conv_norms import conv2d_instances, conv2d_norms

    x, g = (torch.empty(4, c, size, size, dtype=dtype) for c in (inputs, outputs))
    if examples:
        return lambda: conv2d_instances(x, g, [3, 3], 1, 1, examples=examples)
    return lambda: conv2d_norms(x, g, [3, 3], 1, 1)


def weighted(dtype, double):
    from tacit.training.gpu.weighted_rows import weighted_sum

    values, factors = torch.zeros(40, N, dtype=dtype), torch.ones(40)
    return lambda: weighted_sum(values, factors, double=double)


def squares(dtype):
    from tacit.training.gpu.weighted_rows import row_squares

    values = torch.zeros(4, N, dtype=dtype)
    return lambda: row_squares(values)


def rows(dtype):
    from tacit.training.gpu.take_rows import take_rows

    data, target = torch.zeros(50, 21).to(dtype), torch.zeros(8, 21).to(dtype)
    wanted, mask = torch.zeros(9, dtype=torch.int64), torch.zeros(8, dtype=torch.bool)
    return lambda: [take_rows(data, wanted, target, m) for m in (mask, None)]


def blocks_of(rounds, is_banded):
    from tacit.training.gpu.banded_blocks import BandedBlocks
    from tacit.training.gpu.noise import Blocks

    tensors, grids = [torch.zeros(N)], make_grids(1.0, [1.0], N)
    if not is_banded:
        return Blocks(tensors, grids, 1.0, rounds)
    column = optimal_bands(48, 16)
    residuals = torch.zeros(15, N, dtype=torch.int32)
    options = {"column": column, "units": [1.0], "expected_batch": 4.0, "residuals": residuals}
    return BandedBlocks(tensors, grids, 1.0, rounds, **options)


def noise(rounds, is_banded):
    return lambda: blocks_of(rounds, is_banded).launch()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p),
    "adamw": lambda p: torch.optim.AdamW(p),
}


def update(kind, rounds, is_banded):
    from tacit.training.gpu.update import Update

    weight = torch.nn.Parameter(torch.zeros(N))
    weight.grad = torch.zeros(N)
    optimizer = OPTIMIZERS[kind]([weight])
    optimizer.step()
    blocks = blocks_of(rounds, is_banded)
    return lambda: Update(blocks, [weight], optimizer).launch(blocks)


HALF, SINGLE = (torch.bfloat16, torch.float16), torch.float32
CASES = {
    # Of Gram matrices: narrow, short and long, with and without whole slices, by the copy engine.
    **{
        f"gram {dtype} {T} x {D} and {P}": (gram, dtype, T, D, P)
        for dtype in (SINGLE, *HALF)
        for T, D, P in [
            (10, 30, 50), (64, 64, 64), (100, 128, 128), (100, 1024, 1024), (200, 100, 300),
            (512, 768, 2304), (512, 768, 50257), (512, 50, 3000),
        ]
    },
    **{
        f"conv {dtype} {i} to {o}, {e} examples": (conv, dtype, i, o, size, e)
        for dtype in (SINGLE, *HALF)
        for i, o, size in [(3, 16, 32), (64, 64, 32), (256, 256, 8), (20, 33, 7)]
        for e in (0, 1, 4)
    },
    **{
        f"weighted {dtype} {double}": (weighted, dtype, double)
        for dtype in (SINGLE, *HALF)
        for double in (False, True)
    },
    **{f"squares {dtype}": (squares, dtype) for dtype in (SINGLE, *HALF)},
    **{
        f"rows {dtype}": (rows, dtype)
        for dtype in (SINGLE, torch.bfloat16, torch.int64, torch.uint8)
    },
    **{f"noise {r} {b}": (noise, r, b) for r in (12, 20) for b in (False, True)},
    **{
        f"update {kind} {r} {b}": (update, kind, r, b)
        for kind in OPTIMIZERS
        for r in (12, 20)
        for b in (False, True)
    },
}  # fmt: skip
SMOKE = {"noise 12 False", "gram torch.bfloat16 512 x 768 and 2304", "rows torch.float32"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.slow, *[pytest.mark.smoke] * (c in SMOKE)]) for c in CASES],
)
def test_a_kernel_fits_the_gpu_and_is_compiled_soon(case):
    make, *arguments = CASES[case]
    call = make(*arguments)
    with triton_kernels.compiled_for_h200() as found:
        call()
    assert found
    for kernel in found:
        assert kernel.shared <= SHARED, kernel.name
        assert kernel.spilled <= SPILLED, kernel.name
        assert kernel.seconds < SECONDS, kernel.name

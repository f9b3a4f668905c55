"""Per-example 2-d convolution gradients and their norms, without copying patches (Triton).

A convolution is a linear layer on patches: position t of the output reads the patch a_t of K =
kernel height x width x channels values. The kernels read patches directly from the image, which
must be channels last in memory.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch
import triton.language as tl  # pyright: ignore[reportMissingImports]  # as above
from torch import Tensor

from tacit.training.clipping.arithmetic import raised_for_range
from tacit.training.gpu.gram import _gram_tile, _lower_triangle, _store_share, precision, tile_for


@triton.jit
def _conv_gram_kernel(
    a, g, out, apart, T, CI, CO, H, W, OUT_W, KERNEL_W, TAPS, STRIDE, PAD,
    stride_ab, stride_gb,
    TILE: tl.constexpr, DEPTH: tl.constexpr, DEPTH_G: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one tile's part of the squared norm sum_ts (a_t . a_s)(g_t . g_s) of an example.

    a_t is the patch of the image `a` at output position t, and g_t the output gradient there.
    """
    pair = tl.program_id(0)
    example = tl.program_id(1).to(tl.int64)
    i, j = _lower_triangle(pair)
    rows = i * TILE + tl.arange(0, TILE)
    columns = j * TILE + tl.arange(0, TILE)
    has_row, has_column = rows < T, columns < T
    row_y, row_x = (rows // OUT_W) * STRIDE - PAD, (rows % OUT_W) * STRIDE - PAD
    column_y, column_x = (columns // OUT_W) * STRIDE - PAD, (columns % OUT_W) * STRIDE - PAD
    k = tl.arange(0, DEPTH)
    of_a = tl.zeros([TILE, TILE], dtype=tl.float32)
    slices = tl.cdiv(CI, DEPTH)
    image = a + example * stride_ab
    for step in range(TAPS * slices):
        tap, channel = step // slices, (step % slices) * DEPTH + k
        dy, dx = tap // KERNEL_W, tap % KERNEL_W
        y, x = row_y + dy, row_x + dx
        inside = has_row & (y >= 0) & (y < H) & (x >= 0) & (x < W)
        left = tl.load(
            image + ((y * W + x) * CI)[:, None] + channel[None, :],
            mask=inside[:, None] & (channel < CI)[None, :], other=0.0,
        )  # fmt: skip
        y, x = column_y + dy, column_x + dx
        inside = has_column & (y >= 0) & (y < H) & (x >= 0) & (x < W)
        right = tl.load(
            image + ((y * W + x) * CI)[None, :] + channel[:, None],
            mask=inside[None, :] & (channel < CI)[:, None], other=0.0,
        )  # fmt: skip
        of_a = tl.dot(left, right, of_a, input_precision=PRECISION)
    of_g = _gram_tile(
        g + example * stride_gb, CO, rows, columns, T, 0, CO, TILE, DEPTH_G, False, PRECISION
    )
    _store_share(out, apart, example * tl.num_programs(0) + pair, of_a, of_g, i, j, TILE)


@triton.jit
def _conv_instance_kernel(
    a, g, out, norms, T, CI, CO, K, H, W, OUT_W, KERNEL_W, STRIDE, PAD, TILES_K,
    EACH, stride_ab, stride_gb,
    TILE_O: tl.constexpr, TILE_K: tl.constexpr, TILE_T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of one example's weight gradient, and the squared norm of that tile.

    The gradient is a matrix: output channels by the K values of a patch. An example has EACH rows
    of the batch, whose T positions all count.
    """
    tile = tl.program_id(0)
    example = tl.program_id(1).to(tl.int64)
    outputs = (tile // TILES_K) * TILE_O + tl.arange(0, TILE_O)
    values = (tile % TILES_K) * TILE_K + tl.arange(0, TILE_K)
    has_output, has_value = outputs < CO, values < K
    tap, channel = values // CI, values % CI
    dy, dx = tap // KERNEL_W, tap % KERNEL_W
    image, base = a + example * EACH * stride_ab, g + example * EACH * stride_gb
    total = tl.zeros([TILE_O, TILE_K], dtype=tl.float32)
    tiles = tl.cdiv(T, TILE_T)
    for step in range(EACH * tiles):
        row, t = step // tiles, (step % tiles) * TILE_T + tl.arange(0, TILE_T)
        has_t = t < T
        left = tl.load(
            base + row * stride_gb + t[None, :] * CO + outputs[:, None],
            mask=has_output[:, None] & has_t[None, :], other=0.0,
        )  # fmt: skip
        y = ((t // OUT_W) * STRIDE - PAD)[:, None] + dy[None, :]
        x = ((t % OUT_W) * STRIDE - PAD)[:, None] + dx[None, :]
        inside = has_t[:, None] & has_value[None, :] & (y >= 0) & (y < H) & (x >= 0) & (x < W)
        right = tl.load(
            image + row * stride_ab + (y * W + x) * CI + channel[None, :], mask=inside, other=0.0
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    kept = total.to(out.dtype.element_ty)
    has = has_output[:, None] & has_value[None, :]
    tl.store(out + example * CO * K + outputs[:, None] * K + values[None, :], kept, mask=has)
    # The norm is that of the rounded values that are kept, so rounding cannot exceed the clip norm.
    rounded = tl.where(has, kept.to(tl.float32), 0.0)
    tl.store(norms + example * tl.num_programs(0) + tile, tl.sum(tl.sum(rounded * rounded, 1), 0))


def conv2d_norms(
    x: Tensor, g: Tensor, kernel: list[int], stride: int, padding: int
) -> tuple[Tensor, Tensor]:
    """Return each example's squared norm of the weight gradient, and sum_t |a_t| |g_t|.

    x is the input and g the output gradient, both with axes (examples, channels, height, width).
    a_t is the patch of x at output position t. The second result is the scale of the rounding
    error. Both are raised by what numbers too small for float32 may have lost. Tensors that are
    channels last in memory are not copied.
    """
    found = _conv2d_norms(_channels_last(x), _channels_last(g), kernel, stride, padding)
    squared, lengths, *traces = found.unbind()
    positions, widths = g.shape[2] * g.shape[3], kernel[0] * kernel[1] * x.shape[1] + g.shape[1]
    return raised_for_range(squared, lengths, traces, positions=positions, widths=widths)


def conv2d_instances(
    x: Tensor, g: Tensor, kernel: list[int], stride: int, padding: int, *, examples: int
) -> tuple[Tensor, Tensor]:
    """Return each example's weight gradient, and its squared norm.

    Gradients have shape (examples, output channels, *kernel, input channels). x is the input and g
    the output gradient, both with axes (rows, channels, height, width). An example has the same
    number of rows as the others, one after the other, such as its views.
    """
    span = (kernel, stride, padding)
    return _conv2d_instances(_channels_last(x), _channels_last(g), *span, examples)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.permute(0, 2, 3, 1).contiguous()


@torch.library.custom_op("tacit::conv2d_norms", mutates_args=())
def _conv2d_norms(a: Tensor, g: Tensor, kernel: list[int], stride: int, padding: int) -> Tensor:
    """Compute squared norms, lengths and both traces as one tensor of shape (4, examples).

    The input a and the output gradient g have axes (examples, height, width, channels).
    """
    batch, height, width, inputs = a.shape
    _, out_height, out_width, outputs = g.shape
    T = out_height * out_width
    tile = tile_for(T, 64)
    tiles = triton.cdiv(T, tile)
    pairs = tiles * (tiles + 1) // 2
    out = torch.empty(4, batch, pairs, device=a.device, dtype=torch.float32)
    _conv_gram_kernel[(pairs, batch)](  # pyright: ignore[reportIndexIssue]  # a Triton kernel
        a, g, out, out[0].numel(), T, inputs, outputs, height, width, out_width,
        kernel[1], kernel[0] * kernel[1], stride, padding, a.stride(0), g.stride(0),
        TILE=tile, DEPTH=tile_for(inputs, 64), DEPTH_G=tile_for(outputs, 64),
        PRECISION=precision(a), num_warps=_warps(inputs, outputs), num_stages=3,
    )  # fmt: skip
    return out.sum(2)


@_conv2d_norms.register_fake
def _(a: Tensor, g: Tensor, kernel: list[int], stride: int, padding: int) -> Tensor:
    return a.new_empty(4, a.shape[0], dtype=torch.float32)


@torch.library.custom_op("tacit::conv2d_instances", mutates_args=())
def _conv2d_instances(
    a: Tensor, g: Tensor, kernel: list[int], stride: int, padding: int, examples: int
) -> tuple[Tensor, Tensor]:
    """Compute the results of `conv2d_instances`, the gradients in a's dtype.

    The input a and the output gradient g have axes (rows, height, width, channels).
    """
    rows, height, width, inputs = a.shape
    _, out_height, out_width, outputs = g.shape
    K, T = kernel[0] * kernel[1] * inputs, out_height * out_width
    tile_o, tile_k, tile_t = _instance_tiles(outputs, K, T, a.element_size())
    tiles_k = triton.cdiv(K, tile_k)
    tiles = triton.cdiv(outputs, tile_o) * tiles_k
    instances = torch.empty(examples, outputs, *kernel, inputs, device=a.device, dtype=a.dtype)
    norms = torch.empty(examples, tiles, device=a.device, dtype=torch.float32)
    _conv_instance_kernel[(tiles, examples)](  # pyright: ignore[reportIndexIssue]  # a Triton kernel
        a, g, instances, norms, T, inputs, outputs, K, height, width,
        out_width, kernel[1], stride, padding, tiles_k, rows // examples, a.stride(0), g.stride(0),
        TILE_O=tile_o, TILE_K=tile_k, TILE_T=tile_t, PRECISION=precision(a),
        num_warps=_warps(inputs, outputs), num_stages=3,
    )  # fmt: skip
    return instances, norms.sum(1)


@_conv2d_instances.register_fake
def _(
    a: Tensor, g: Tensor, kernel: list[int], stride: int, padding: int, examples: int
) -> tuple[Tensor, Tensor]:
    shape = (examples, g.shape[3], *kernel, a.shape[3])
    return a.new_empty(shape), a.new_empty(examples, dtype=torch.float32)


def _instance_tiles(outputs: int, K: int, T: int, item_size: int) -> tuple[int, int, int]:
    """Return the tiles of outputs, patch values and positions.

    Those of 2-byte numbers were fastest on an H200, for 256 examples of 16 views.
    """
    most = 64 if item_size == 4 else 128
    return tile_for(outputs, most), tile_for(K, most), tile_for(T, 64)


def _warps(inputs: int, outputs: int) -> int:
    """Return the warps of a program: 4 were fastest on an H200 for channels in multiples of 16.

    Other numbers of channels are not read in whole vectors. With 4 warps, the addresses would not
    fit in a thread's registers.
    """
    return 4 if inputs % 16 == outputs % 16 == 0 else 8

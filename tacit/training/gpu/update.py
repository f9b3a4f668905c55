"""Noise and the optimizer's update in one pass over the parameters (Triton).

Memory bandwidth limits both. One after the other they would write the gradient and read it back;
here the noisy gradient is formed in registers, stored in place of the sum, and used at once. The
noise is that of `noise.Blocks`. SGD and Adam follow the formulas of torch.optim.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with CUDA builds of torch
import triton.language as tl  # pyright: ignore[reportMissingImports]  # as above
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from tacit.training.clipping.clip import call_each
from tacit.training.gpu.banded_blocks import mixed_past, released_with_residual
from tacit.training.gpu.noise import (
    LANES,
    WARPS,
    Blocks,
    aligned,
    grid_of,
    normals,
    released,
    takes,
)


@triton.jit
def _sgd(p, g, first, settings, inside, HAS_MOMENTUM: tl.constexpr, IS_NESTEROV: tl.constexpr):
    rate, momentum, undamped, decay = settings[0], settings[1], settings[2], settings[3]
    value = tl.load(p, mask=inside)
    change = g + decay * value
    if HAS_MOMENTUM:
        buffer = momentum * tl.load(first, mask=inside) + undamped * change
        tl.store(first, buffer, mask=inside)
        change = change + momentum * buffer if IS_NESTEROV else buffer
    tl.store(p, value - rate * change, mask=inside)


@triton.jit
def _adam(p, g, first, second, unbias, settings, inside, IS_DECOUPLED: tl.constexpr):
    rate, unbeta1, beta2, unbeta2 = settings[0], settings[1], settings[2], settings[3]
    decay, epsilon = settings[4], settings[5]
    value = tl.load(p, mask=inside)
    if IS_DECOUPLED:
        value -= decay * value
    else:
        g += decay * value
    mean, square = tl.load(first, mask=inside), tl.load(second, mask=inside)
    mean += unbeta1 * (g - mean)
    square = beta2 * square + unbeta2 * g * g
    tl.store(first, mean, mask=inside)
    tl.store(second, square, mask=inside)
    size = tl.sqrt(square) / tl.sqrt(unbias[1]) + epsilon
    tl.store(p, value - (rate / unbias[0]) * mean / size, mask=inside)


@triton.jit
def _one_minus_exp(x):
    """Compute 1 - exp(x) for x < 0, accurate even near 0; used in Adam's bias correction."""
    series = -x * (1.0 + x / 2.0 * (1.0 + x / 3.0 * (1.0 + x / 4.0 * (1.0 + x / 5.0))))
    return tl.where(x > -0.1, series, 1.0 - tl.exp(x))


@triton.jit(do_not_specialize=["rows", "size"])
def _update_kernel(
    sums, parameters, firsts, seconds, steps, groups, table, counts, counters, grids, key, nonce,
    residuals, rows, size, begins, units, column, phase, expected, IS_BANDED: tl.constexpr,
    IS_ADAM: tl.constexpr, FLAG: tl.constexpr, HAS_MOMENTUM: tl.constexpr, LANES: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """Add noise to one block of clipped sums, and update the block's parameters by the result.

    The noisy gradient is that of `noise.released`, or of `banded_blocks` if residuals are kept.
    It replaces the sum in memory. A block has up to 8 LANES numbers.
    """
    block = tl.program_id(0)
    g, p = aligned(sums, block), aligned(parameters, block)
    first, second = aligned(firsts, block), aligned(seconds, block)
    row = table + tl.load(groups + block) * 8
    settings = (
        tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4),
        tl.load(row + 5),
    )  # fmt: skip
    unbias = (0.0, 0.0)
    if IS_ADAM:
        step = tl.load(tl.load(steps + block).to(tl.pointer_type(tl.float32)))
        unbias = (
            _one_minus_exp(step * tl.load(row + 6)), _one_minus_exp(step * tl.load(row + 7))
        )  # fmt: skip
    count, grid = tl.load(counts + block), grid_of(grids, block)
    unit, batch, weight, pasts, newest = 0.0, 0.0, 0.0, (0.0, 0.0), residuals
    if IS_BANDED:
        begin, unit, now = tl.load(begins + block), tl.load(units + block), tl.load(phase)
        batch, weight = tl.load(expected), tl.load(column)
        pasts = mixed_past(residuals, rows, size, begin, count, column, now, LANES)
        newest = residuals + (begin + now * size)
    lane = tl.arange(0, LANES)
    zs = normals(key, tl.load(nonce), tl.load(counters + block) + lane, ROUNDS)
    for i in tl.static_range(8):
        at = lane + i * LANES
        inside = at < count
        total = tl.load(g + at, mask=inside, other=0.0)
        if IS_BANDED:
            noisy, e = released_with_residual(total, pasts[i], zs[i], grid, weight, unit, batch)
            tl.store(newest + at, e, mask=inside)
        else:
            noisy = released(total, zs[i], grid)
        tl.store(g + at, noisy, mask=inside)
        if IS_ADAM:
            _adam(p + at, noisy, first + at, second + at, unbias, settings, inside, FLAG)
        else:
            _sgd(p + at, noisy, first + at, settings, inside, HAS_MOMENTUM, FLAG)


class Update:
    """The noise of `Blocks`, then the step of an optimizer, in one launch.

    Learning rates are read from device memory, so a recorded launch follows a schedule.
    """

    def __init__(self, noise: Blocks, parameters: Sequence[Tensor], optimizer: Optimizer) -> None:
        # Keep no reference to `noise`, so both are freed together.
        self._optimizer = optimizer
        self._is_adam = isinstance(optimizer, Adam | AdamW)
        group_of = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
        device = parameters[0].device
        self._groups = noise.spread([group_of[id(p)] for p in parameters], torch.int32).to(device)
        self._table = torch.zeros(len(optimizer.param_groups), 8, device=device)
        self._rows: list[list[float]] = []
        self._parameters = noise.begin(parameters)
        state = _state(parameters, optimizer)
        assert state is not None  # `can_update` looked
        firsts, seconds, self._counted = state
        self._firsts, self._seconds = noise.begin(firsts), noise.begin(seconds)
        places = [step.data_ptr() for step in self._counted] or [0] * len(parameters)
        self._steps = noise.spread(places, torch.int64).to(device)

    def set_rates(self) -> None:
        """Copy the optimizer's settings to the device if they have changed."""
        rows = [_settings(group) for group in self._optimizer.param_groups]
        if rows != self._rows:
            self._rows = rows
            self._table.copy_(torch.tensor(rows))

    def launch(self, noise: Blocks) -> None:
        """Add the noise of the nonce set in `noise` to the sums, and update the parameters."""
        group = self._optimizer.param_groups[0]
        if self._is_adam:
            call_each("add_", self._counted, [1.0] * len(self._counted))
        _update_kernel[(len(noise.places),)](  # pyright: ignore[reportIndexIssue]  # a Triton kernel
            noise.places, self._parameters, self._firsts, self._seconds, self._steps,
            self._groups, self._table, noise.counts, noise.counters, noise.grids, noise.key,
            noise.nonce, *noise.past, IS_BANDED=noise.is_banded, IS_ADAM=self._is_adam,
            FLAG=_flag(self._optimizer, group), HAS_MOMENTUM=bool(group.get("momentum")),
            LANES=LANES, ROUNDS=noise.rounds, num_warps=WARPS,
        )  # fmt: skip


def can_update(sums: Sequence[Tensor], parameters: Sequence[Tensor], optimizer: Optimizer) -> bool:
    """Return True if the fused update kernel supports this optimizer, its settings and its state.

    Each parameter must also have the same memory layout as its sum and its optimizer state.
    """
    if type(optimizer) not in (SGD, Adam, AdamW):
        return False
    groups = optimizer.param_groups
    if type(optimizer) is AdamW and not all("decoupled_weight_decay" in g for g in groups):
        return False  # before torch 2.7 the groups did not have that entry
    for name in ("maximize", "amsgrad", "differentiable"):
        if any(group.get(name) for group in groups):
            return False
    kinds = {(_flag(optimizer, group), bool(group.get("momentum"))) for group in groups}
    if len(kinds) > 1 or any(isinstance(group["lr"], Tensor) for group in groups):
        return False
    listed = [id(p) for group in groups for p in group["params"]]
    if len(set(listed)) < len(listed):
        return False  # torch updates a parameter twice if it is listed twice
    state = _state(parameters, optimizer)
    if state is None:
        return False
    return all(
        takes(like) and like.stride() == total.stride()
        for total, *others in zip(sums, parameters, *state[:2], strict=True)
        for like in others
    )


def _state(
    parameters: Sequence[Tensor], optimizer: Optimizer
) -> tuple[list[Tensor], list[Tensor], list[Tensor]] | None:
    """Return two lists of state tensors, one tensor per parameter, and Adam's step counters.

    For Adam these are the running means of gradients and of their squares; for SGD, the momentum. A
    parameter itself stands in for a state that the optimizer does not keep. Return None if the
    kernel cannot use the state, or if the state does not exist yet.
    """
    names = ["exp_avg", "exp_avg_sq", "step"]
    if isinstance(optimizer, SGD):
        names = ["momentum_buffer"] if optimizer.param_groups[0]["momentum"] else []
    states = [optimizer.state.get(p, {}) for p in parameters]  # [p] would create one
    held = [[state.get(name) for state in states] for name in names]
    # torch counts steps in float64 if that is the default dtype.
    if not all(
        isinstance(t, Tensor) and t.device == parameters[0].device and t.dtype == torch.float32
        for column in held
        for t in column
    ):
        return None
    first, second, *steps = [*held, *[list(parameters)] * (2 - len(held))]
    return first, second, steps[0] if steps else []


def _settings(group: dict[str, Any]) -> list[float]:
    """Return a parameter group's row for the kernel: learning rate and other constants.

    The order is that in which `_adam` or `_sgd` reads them. Logarithms of Adam's betas come last.
    """
    rate, decay = group["lr"], group["weight_decay"]
    if "betas" not in group:
        return [rate, group["momentum"], 1 - group["dampening"], decay, 0.0, 0.0, 0.0, 0.0]
    first, second = group["betas"]
    decay = rate * decay if group.get("decoupled_weight_decay") else decay
    constants = [rate, 1 - first, second, 1 - second, decay, group["eps"]]
    return [*constants, *(math.log(beta) if beta > 0 else -math.inf for beta in (first, second))]


def _flag(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return the kernel's FLAG: Nesterov momentum for SGD, decoupled weight decay for Adam."""
    if isinstance(optimizer, SGD):
        return bool(group["nesterov"])
    return bool(group.get("decoupled_weight_decay"))

"""Rounding: how far results move if nothing but the order of additions or a kernel changes.

Tests of isolation compare results of two computations. What differs by no more than rounding is no
mixing. Rounding is measured on the program itself: by running it again, by moving its parameters by
one unit of rounding, and by running clones of a row.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tacit.training.clip import Clip
from tacit.training.gradients.ghost_norm import multiplied_in
from tacit.training.key import randomness
from tacit.training.records import Indices
from tacit.training.tree import Batch, map_rows

ROOM = 32.0
"""Difference, in units of measured rounding, that is taken for mixing."""
_REPEATS = 3  # of a lot, before its differences are taken for rounding
_PAIRS = 8  # moves of the parameters for a lot that follows itself
_PIECE = 2**17  # numbers that are compared at once

Gradient = Sequence[Tensor]
"""A clipped sum, by parameter. That of a large table may be sparse."""


class Program(Protocol):
    """A program whose clipped sums are limited by `clip`, with losses rounded to `loss_unit`."""

    model: nn.Module
    clip: Clip
    loss_unit: float


class Trial(Protocol):
    """Runs of a program on the lot `rows`, always from the same state and random numbers."""

    rows: Indices
    base: Tensor

    @property
    def program(self) -> Program:
        """The program that is run."""
        ...

    def losses(self, rows: Indices, *, after: Indices | None = None) -> Tensor:
        """Return the losses of a lot, (rows, views)."""
        ...

    def gradient(self, rows: Indices, count: Indices, *, after: Indices | None = None) -> Gradient:
        """Return the clipped sum over the rows in `count`."""
        ...


class Rounding:
    """How far losses and gradients move by rounding alone, measured on one lot, row by row.

    Lots of the same shape run the same kernels, so as a rule their rows are equal to the last bit.
    Where they are not (rows sorted or sent to experts inside the program, kernels that add in any
    order), it is measured how far each row moves if the lot is run again and if parameters move by
    the last bit of float32: that is what sums in another order do. This is fine rounding.

    Lots of other sizes run other kernels, which may round every intermediate result in another way.
    So for them parameters move by one unit of the coarsest type in which the program computes.
    """

    def __init__(self, trial: "Trial", unit: float) -> None:
        self._trial, self._unit = trial, unit
        self._moves: dict[bool, list[Tensor]] = {False: [], True: []}
        size = trial.base.abs().nan_to_num(0.0, 0.0, 0.0)
        # A result is rounded itself, in the type of the losses.
        self.of_results = 2 * trial.program.loss_unit * size
        self.is_coarse = unit > torch.finfo(torch.float32).eps

    @functools.cached_property
    def _repeats(self) -> Tensor:
        """How far each loss moves if the lot is run again, at most.

        A lot that gives the same to the last bit is run again once.
        """
        trial, runs = self._trial, list[Tensor]()
        while len(runs) < _REPEATS and (not runs or bool(runs[0].any())):
            runs.append(distance(trial.base, trial.losses(trial.rows)))
        return torch.stack(runs).amax(0)

    @functools.cached_property
    def is_unrepeatable(self) -> bool:
        """Whether the lot gives other losses when it is run again, by more than rounding.

        Then the program draws random numbers from a source that cannot be put back, or has state of
        another kind that cannot be.
        """
        size = self._trial.base.abs().nan_to_num(0.0, 0.0, 0.0)
        return bool((self._repeats > self._unit * size).any())

    def slack(self, times: int, *, is_fine: bool) -> Tensor:
        """Return the differences of losses that rounding explains, by `times` moves. Per row."""
        trial = self._trial
        if self.is_unrepeatable:
            return self.of_results
        moves = self._moves[is_fine]
        while len(moves) < times:
            with moved_parameters(trial.program.model, None if is_fine else self._unit, len(moves)):
                moves.append(distance(trial.base, trial.losses(trial.rows)))
        largest = torch.stack([self._repeats, *moves]).amax(0)
        if not is_fine:  # parameters that are zero do not move
            largest = largest + self._unit * trial.base.abs().nan_to_num(0.0, 0.0, 0.0)
        return ROOM * largest + self.of_results

    def slack_of_clones(self, place: int) -> Tensor:
        """Return the differences that rounding explains for one row, from lots of its clones.

        Clones cannot tell each other anything, so their losses differ by rounding, between places
        and between sizes of the lot. What depends on the size itself is not rounding: it counts up
        to what coarse rounding does.
        """
        trial, row = self._trial, self._trial.rows[place]
        sizes = {1, 2, 3, 5, *(len(trial.rows) // part for part in (4, 2, 1))}
        found = [trial.losses(np.full(size, row)) for size in sorted(sizes - {0})]
        within = torch.stack([distance(run[:1], run).amax(0) for run in found]).amax(0)
        between = torch.stack([distance(found[-1][:1], run).amax(0) for run in found]).amax(0)
        fine = self.slack(8, is_fine=True)[place]
        coarse = self.slack(8, is_fine=False)[place]
        return fine + torch.minimum(ROOM * torch.maximum(within, between), coarse)

    def after_itself(self) -> Tensor:
        """Return the largest change of each loss if the lot has come before several times."""
        trial = self._trial
        settled = trial.base
        for _ in range(_PAIRS):
            settled = trial.losses(trial.rows, after=trial.rows)
        found = []
        for seed in range(_PAIRS):
            with moved_parameters(trial.program.model, None, seed):
                moved = trial.losses(trial.rows, after=trial.rows)
            found.append(distance(settled, moved))
            settled = trial.losses(trial.rows, after=trial.rows)
        return torch.stack(found).amax(0)

    def slack_of_gradients(
        self, rows: Indices, kept: Indices, times: int, *, is_fine: bool
    ) -> float:
        """Return the change of the clipped sum over the rows in `kept` that rounding explains."""
        trial, unit = self._trial, None if is_fine else self._unit
        base = trial.gradient(rows, kept)
        # A result is rounded itself, and so is a sum of clipped gradients in float32.
        last = torch.finfo(torch.float32).eps
        sums = last * len(kept) ** 0.5 * trial.program.clip.l2_sensitivity
        found = (last if is_fine else self._unit) * norm_of_difference(base) + sums
        for seed in range(times):
            found = max(found, norm_of_difference(trial.gradient(rows, kept), base))
            with moved_parameters(trial.program.model, unit, seed):
                found = max(found, norm_of_difference(trial.gradient(rows, kept), base))
        return ROOM * found


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Return the differences of losses, row by row; 0 where one of them is not finite."""
    return (a - b).abs().nan_to_num(0.0, 0.0, 0.0)


@contextmanager
def in_double(model: nn.Module) -> Iterator[nn.Module]:
    """Give a copy of `model` in float64, which is the default type of torch inside the block."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield copy.deepcopy(model).double()
    finally:
        torch.set_default_dtype(default)


def as_double(batch: Batch) -> Batch:
    """Return a batch whose floating-point numbers are float64."""
    return map_rows(lambda t: t.double() if t.is_floating_point() else t, batch)


def norm_of_difference(a: Gradient, b: Gradient | None = None) -> float:
    """Return the norm of `a` - `b`, or that of `a` alone, added up in float64."""
    squares: list[Tensor] = []  # read at the end: a GPU would wait for the host at each of them
    for number, x in enumerate(a):
        y = None if b is None else b[number]
        if x.is_sparse and y is not None and y.is_sparse:
            x, y = x - y, None  # the rows that one of them has
        if x.is_sparse and y is None:
            x = x.coalesce().values()
        others = itertools.repeat(0.0) if y is None else pieces(y)
        parts = zip(pieces(x), others, strict=False)
        squares += [(p - q).square().sum().to(a[0].device) for p, q in parts]
    return math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0


def summary_of(gradient: Gradient) -> Tensor:
    """Return 16 sums of parts of a gradient, whose entries get random signs of a fixed period."""
    size = sum(t.numel() for t in gradient)
    ends = [size * part // 16 for part in range(1, 16)]
    signs = torch.randint(0, 2, (1021,), generator=torch.Generator().manual_seed(0)) * 2 - 1
    sums, place = torch.zeros(16, dtype=torch.float64, device=gradient[0].device), 0
    for piece in itertools.chain.from_iterable(map(pieces, gradient)):
        n = len(piece)
        signed = piece * signs.to(piece).roll(-place).repeat(-(-n // 1021))[:n]
        first = sum(end <= place for end in ends)
        cuts = [end - place for end in ends[first:] if end < place + n]
        for part, values in enumerate(signed.tensor_split(cuts), start=first):
            sums[part] += values.sum()
        place += n
    return sums


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor's entries in float64, some at a time: a whole gradient may be large."""
    size = 2**5 * _PIECE if tensor.is_cuda else _PIECE  # few launches, or what a cache holds
    for piece in tensor.to_dense().reshape(-1).split(size):
        yield piece.double()


@contextmanager
def moved_parameters(model: nn.Module, unit: float | None, seed: int) -> Iterator[None]:
    """Move every parameter by about one unit of rounding inside the block, at random by `seed`.

    How far a result moves then is how far it can differ between two ways to compute it, such as
    kernels for two sizes of a batch. That makes it the measure of what is not mixing. Without
    `unit`, parameters of float32 and finer types move by their own last bit, and others stay.
    """
    parameters = [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]
    if unit is None:
        parameters = [p for p in parameters if torch.finfo(p.dtype).bits >= 32]
    held = [p.detach().clone() for p in parameters]
    try:
        with torch.no_grad(), randomness(seed, next(model.parameters()).device):
            for p in parameters:
                p.mul_(torch.randn_like(p).mul_(max(unit or 0.0, torch.finfo(p.dtype).eps)).add_(1))
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, held, strict=True):
                p.copy_(value)


def exceeds_rounding(
    model: nn.Module,
    run: Callable[[], Sequence[Tensor | None]],
    before: Sequence[Tensor | None],
    after: Sequence[Tensor | None],
) -> bool:
    """Return whether results differ by more than rounding can explain, which is measured.

    `run` computes `before` again; `after` is another computation, of the same values if examples do
    not mix.
    """
    if any((a is None) != (b is None) for a, b in zip(before, after, strict=True)):
        return True
    with rounding_unit() as unit:
        run()
    room = [unit() * _largest(a, None if a is None else torch.zeros_like(a)) for a in before]
    for seed in range(8):
        with moved_parameters(model, unit(), seed):
            room = [max(r, _largest(a, b)) for r, a, b in zip(room, before, run(), strict=True)]
    differences = (_largest(a, b) for a, b in zip(before, after, strict=True))
    return any(d > ROOM * r for d, r in zip(differences, room, strict=True))


def _largest(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None or not a.numel():
        return 0.0
    largest = 0.0
    for x, y in zip(pieces(a.detach()), pieces(b.detach()), strict=True):
        if bool((torch.isfinite(x) != torch.isfinite(y)).any()):
            return math.inf
        largest = max(largest, float((x - y).nan_to_num_(0.0, 0.0, 0.0).abs().amax()))
    return largest


@contextmanager
def rounding_unit() -> Iterator[Callable[[], float]]:
    """Watch what runs in the block; the function given returns its coarsest unit of rounding.

    Parameters do not show it: under autocast, float32 parameters are multiplied in bfloat16.
    """
    with _Dtypes() as watched:
        yield lambda: max(map(_unit, watched.seen), default=0.0)


# They change the type of each number by itself, in the same way in every lot.
_CASTS = {
    *(Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.double),
    *(Tensor.half, Tensor.bfloat16, Tensor.detach, Tensor.contiguous),
}


class _Dtypes(TorchFunctionMode):
    """Collects the types of floating-point results that were computed, not cast.

    Types of 8 bits store numbers; products of them have results of other types.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_computed = isinstance(result, Tensor) and func not in _CASTS
        if is_computed and result.is_floating_point() and result.element_size() > 1:
            self.seen.add(result.dtype)
        return result


def _unit(dtype: torch.dtype) -> float:
    """Return the relative error of one operation: matrix products may round more coarsely."""
    return torch.finfo(multiplied_in(dtype)).eps

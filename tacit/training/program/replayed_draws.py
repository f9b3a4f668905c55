"""Random numbers of a run, recorded and given again to runs of other sizes of lots.

A call on a whole lot and calls on its examples draw other numbers. To compare them, the numbers of
the lot are recorded, and each example is given its part of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tacit.training.torch_internals import TorchDispatchMode, schema_of

# Operators that only draw, without the underscore of those that write in place.
_NAMES = {
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial",
    "native_dropout", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "random", "randperm", "uniform", "_sample_dirichlet", "_standard_gamma",
}  # fmt: skip


class LotDraws:
    """The random numbers of a lot of `examples` examples, in the order in which they are drawn.

    `is_matched` becomes False if an example draws other numbers than its part of the lot.
    """

    def __init__(self, examples: int) -> None:
        self.examples = examples
        self.whole: list[tuple[Any, Tensor]] = []
        self.alone: dict[tuple[int, int], Tensor] = {}  # by draw and example: without such a part
        self.is_matched = True

    def recorded(self) -> "_Replay":
        """Return a context in which the numbers of the whole lot are recorded."""
        self.whole.clear()
        return _Replay(self, None)

    def again(self) -> "_Replay":
        """Return a context in which the whole lot is given the numbers that were recorded."""
        return _Replay(self, slice(None))

    def of_example(self, number: int) -> "_Replay":
        """Return a context in which one example is given its part of the numbers."""
        return _Replay(self, number)

    def of_all(self) -> "_Replay":
        """Return a context in which all examples, on a new first axis, are given their parts."""
        return _Replay(self, range(self.examples))

    def parts(self, place: int, key: Any, shape: Sequence[int]) -> Tensor | None:
        """Return the parts of a draw that examples have, on a new first axis, if they match."""
        if place >= len(self.whole) or self.whole[place][0] != key:
            return None
        drawn = self.whole[place][1]
        if drawn.shape == torch.Size(shape):  # one draw for the lot
            return drawn.expand(self.examples, *drawn.shape)
        for axis in range(drawn.dim()):
            parts = (
                drawn.unflatten(axis, (self.examples, -1)) if self._splits(drawn, axis) else None
            )
            if parts is not None and parts.movedim(axis, 0).shape[1:] == torch.Size(shape):
                return parts.movedim(axis, 0)
        return None

    def _splits(self, drawn: Tensor, axis: int) -> bool:
        return drawn.shape[axis] % self.examples == 0


class _Replay(TorchDispatchMode):
    """Replaces what is drawn, in the order of the draws."""

    def __init__(self, draws: LotDraws, which: Any) -> None:
        super().__init__()
        self.draws, self.which = draws, which
        self.place = self.repeated = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        if name not in _NAMES:
            return result
        drawn = result[1] if name == "native_dropout" else result
        # Numbers that are drawn between other bounds, or of other numbers, are not a part.
        omitted = [argument.default_value for argument in schema_of(func).arguments[len(args) :]]
        key = name, [a for a in (*args, *omitted) if isinstance(a, int | float)]
        value = self._given(key, drawn)
        if self.repeated in (0, self.draws.examples):
            self.place, self.repeated = self.place + 1, 0
        if value is not None:
            drawn.copy_(value)
            if name == "native_dropout":
                result[0].copy_(args[0] * drawn / (1 - args[1]))
        return result

    def _given(self, key: Any, drawn: Tensor) -> Tensor | None:
        draws, place = self.draws, self.place
        if self.which is None:
            draws.whole.append((key, drawn.detach().clone()))
            return None
        if isinstance(self.which, slice):
            return draws.whole[place][1] if place < len(draws.whole) else None
        if isinstance(self.which, int):
            parts = draws.parts(place, key, drawn.shape)
            if parts is not None:
                return parts[self.which]
            draws.is_matched = False
            return draws.alone.setdefault((place, self.which), drawn.detach().clone())
        # A mapped operator draws for all examples at once, or for one after the other.
        for shape in (drawn.shape[1:], drawn.shape):
            parts = draws.parts(place, key, shape)
            if parts is None and (place, 0) in draws.alone:
                parts = torch.stack([draws.alone[place, i] for i in self.which])
            if parts is not None and parts.shape == drawn.shape:
                return parts
            if parts is not None and parts.shape[1:] == drawn.shape:
                self.repeated += 1
                return parts[self.repeated - 1]
        return None

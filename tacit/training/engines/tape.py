"""What one backward leaves behind: each example's norms, and pieces to weigh with its factor."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tacit.training.clip import Clip
from tacit.training.engines import batch as b
from tacit.training.engines.trace import Label
from tacit.training.gradients import derived
from tacit.training.gradients.factored import Dense, apart, combine, joined
from tacit.training.gradients.site import Layout, Piece, Site
from tacit.training.sums import ClippedSum, accumulator

NonFinite = Literal["look", "mask", "ignore"]
"""What to do about examples whose gradient is not finite, which must add zero: "look" at the norms
and mask rows only if need be (waits for the device); always "mask" (a pass over the activations,
and a copy of them); or "ignore", where the caller looks and takes the sum only if all are finite.
"""


class Derived(NamedTuple):
    """Tensors computed from shared tensors alone, and the call that made them."""

    results: tuple[Tensor, ...]
    function: Any
    args: Any
    kwargs: dict[str, Any]


class Recorder:
    """Collects pieces in the backward; `clipped` turns them into the sum.

    A parameter that one call uses is settled at once: its norm is taken and it may let go of its
    activations. Pieces of one that several calls use, or of a tensor derived from parameters, wait
    until all are there.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], examples: int, clip: Clip) -> None:
        self.parameters, self.examples, self.clip = parameters, examples, clip
        self.labels: dict[int, Label] = {id(p): name for name, p in parameters.items()}
        self.groups = b.group_index(clip, list(parameters))
        self.anchor = torch.zeros((), requires_grad=True)
        self.uses: Counter[int] = Counter()
        self.waiting: dict[int, list[Piece]] = {}
        self.derived: list[Derived] = []
        self.norms: list[list[Tensor]] = [[] for _ in clip.clip_norms]
        self.settled: list[tuple[list[str], Piece]] = []
        self.small: dict[int, list[tuple[str, Dense]]] = {}  # by group
        self.done: set[str] = set()
        self.rounding = 0.0
        self.is_recording = False

    def count(self, tensors: tuple[Tensor, ...]) -> None:
        """A call that reads these tensors has been seen."""
        for tensor in tensors:
            if id(tensor) in self.labels:
                self.uses[id(tensor)] += 1

    def site(
        self, tensors: tuple[Tensor, ...], layouts: tuple[Layout | None, ...], output: Layout
    ) -> Site:
        """What a rule is told about one call."""
        return Site(
            self.examples, tensors, layouts, output, self.is_shared, self.record, self.anchor
        )

    def is_shared(self, tensor: Tensor | None) -> bool:
        """Whether gradients of this tensor are wanted."""
        return id(tensor) in self.labels

    def derive(self, made: Derived, tensors: tuple[Tensor, ...]) -> None:
        """A call on shared tensors alone: it uses them, and its results are shared."""
        self.count(tensors)
        self.derived.append(made)

    def record(self, tensor: Tensor, piece: Piece) -> None:
        """A piece that stands alone gives its norm now, and may free its activations.

        A backward inside the loss (an attack, a penalty on gradients) is not the one to record.
        """
        if not self.is_recording:
            return
        label = self.labels[id(tensor)]
        if isinstance(label, str) and self.uses[id(tensor)] == 1:
            self._settle(label, piece)
        else:
            self.waiting.setdefault(id(tensor), []).append(piece)

    def _settle(self, name: str, piece: Piece) -> None:
        # Two norms of one parameter would lack their cross term.
        assert name not in self.done, f"{name} was settled before"
        self.done.add(name)
        if isinstance(piece, Dense) and piece.is_better_joined():
            self.small.setdefault(self.groups[name], []).append((name, piece))
        else:
            self._measure([name], piece)

    def _measure(self, names: list[str], piece: Piece) -> None:
        squared, kept = piece.settle()
        self.rounding = max(self.rounding, b.rounding_of(kept.dtype))
        self.norms[self.groups[names[0]]].append(squared)
        self.settled.append((names, kept))

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Afterwards nothing is held, whether or not memory ran out inside.

        Pieces hold activations, these the autograd graph, and its nodes this recorder: a ring in
        part outside Python, which its garbage collector cannot see.
        """
        try:
            yield
        finally:
            for held in (self.waiting, self.derived, self.norms, self.settled, self.small):
                held.clear()

    def clipped(self, mask: Tensor, nonfinite: NonFinite) -> ClippedSum:
        """The sum of the rows where `mask` is True."""
        self._settle_waiting()
        squared = self._squared_norms(mask.device)
        finite = None
        looked = nonfinite == "look" and not math.isfinite(float(squared.sum()))
        if nonfinite == "mask" or looked:
            finite = torch.isfinite(squared).all(0)
        factors, within = b.factors_of(self.clip, squared, mask, self.rounding, finite)
        sums: dict[str, Tensor] = {}
        while self.settled:  # newest first: frees the activations on the way
            names, piece = self.settled.pop()
            value = piece.weighted_sum(factors[self.groups[names[0]]], finite)
            shapes = [self.parameters[name].shape for name in names]
            for name, part in zip(names, apart(value, shapes), strict=True):
                sums[name] = part.to(accumulator(self.parameters[name].dtype))
        return ClippedSum(
            {
                name: sums[name] if name in sums else _zeros(p)
                for name, p in self.parameters.items()
            },
            within,
        )

    def _squared_norms(self, device: torch.device) -> Tensor:
        """(groups, examples)."""
        if len(self.norms) == 1 and self.norms[0]:
            return sum(self.norms[0][1:], self.norms[0][0]).unsqueeze(0)
        zero = torch.zeros(self.examples, device=device)
        return torch.stack([sum(n[1:], n[0]) if n else zero for n in self.norms])

    def _settle_waiting(self) -> None:
        for made in reversed(self.derived):
            for result in made.results:
                pieces = self.waiting.pop(id(result), None)
                if pieces:
                    found = derived.origin(made, result, combine(pieces), self.parameters)
                    for tensor, piece in found:
                        self.waiting.setdefault(id(tensor), []).append(piece)
        for name, p in self.parameters.items():
            pieces = self.waiting.pop(id(p), None)
            if pieces:
                self._settle(name, combine(pieces))
        for members in self.small.values():
            names, pieces = zip(*members, strict=True)
            self._measure(list(names), joined(pieces))


def _zeros(p: Tensor) -> Tensor:
    return torch.zeros_like(p, dtype=accumulator(p.dtype), requires_grad=False)

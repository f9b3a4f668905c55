"""Weights move by released gradients only: notice whatever else has changed a model during a run.

The most common mistake of a private program is the line of the old one that was left in: beside
`private.step(batch)`, `loss.backward(); optimizer.step()` still trains on the records, unpaid. So a
copy of some bytes of every parameter and of every saved buffer of real numbers is kept when a
step of the run has ended, and compared before the next step is paid, when the loop ends, and when
the run is certified. Equal values are no change: weights may be replaced for an evaluation and put
back. Before the first step anything may be loaded, but the optimizer may not have stepped.

Not noticed: changes of a few entries of a large tensor, and gradients of `torch.autograd.grad` that
a loop adds to `p.grad` by hand.
"""

import itertools
from collections.abc import Iterator
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tacit.errors import LearningStep

_FEW, _SOME = 8192, 512  # bytes: a tensor of at most so many is kept whole; kept of a larger one
_EVERY = 16  # steps between two comparisons on a GPU, which wait for it
_NEXT = (
    "Remove what changes it, such as the old lines loss.backward() and optimizer.step() beside "
    "private.step(batch); or, if no private record has a part in the change, say why with "
    'private.declare_public_change("reason") after it.'
)
_OF_MODELS: "WeakKeyDictionary[nn.Module, WeightChanges]" = WeakKeyDictionary()


def changes_of(model: nn.Module) -> "WeightChanges":
    """Return the marks of a model, which all runs on it share."""
    if model not in _OF_MODELS:
        _OF_MODELS[model] = WeightChanges(model)
    return _OF_MODELS[model]


def mark(model: nn.Module) -> None:
    """Take what a model holds now for what it should hold, if a run moves it: tacit wrote it."""
    if (changes := _OF_MODELS.get(model)) is not None and changes.is_begun:
        changes.mark()


class WeightChanges:
    """What a model held when tacit last wrote into it, and whether anything else has changed it.

    Attributes
    ----------
    declared
        The reasons of changes that the user has declared public, oldest first.
    """

    def __init__(self, model: nn.Module) -> None:
        self.declared: list[str] = []
        self._places = dict(_places(model))
        self._bytes: list[Tensor] = []  # some of each place
        self._addresses: list[int] = []
        self._held: Tensor | None = None
        self._checks = 0
        self._stopped = ""  # the sentence with which a run was stopped

    @property
    def is_begun(self) -> bool:
        """Whether a run has moved the model."""
        return self._held is not None

    def mark(self) -> None:
        """Take what the model holds now for what it should hold: a release has moved it there."""
        self._held = _joined(self._now())

    def enter_step(self, model: nn.Module, *, is_first: bool) -> None:
        """Begin a run with what the model and its layers hold; raise if it has changed since."""
        if self._stopped or not is_first:
            self.require_unchanged()
        else:
            self._places = dict(_places(model))
            self.mark()

    def require_unchanged(self, *, model: nn.Module | None = None) -> None:
        """Raise `LearningStep` if the model does not hold what it should.

        At the end of a run give the model, whose layers may be others now.
        """
        if self._stopped:
            self.stop(self._stopped)
        self._checks += 1
        is_whole = model is not None or self._checks % _EVERY == 0
        if self._held is None or (self._held.is_cuda and not is_whole):
            return
        places = self._places if model is None else dict(_places(model))
        parts = self._now() if model is None else [_some(t) for t in places.values()]
        now = _joined(parts)
        if places.keys() == self._places.keys() and now.shape == self._held.shape:
            if torch.equal(now, self._held.to(now.device)):
                return
            entry = int((now != self._held.to(now.device)).nonzero()[0])
            ends = itertools.accumulate(map(len, parts))
            name = next(n for n, end in zip(places, ends, strict=True) if entry < end)
        else:
            name = "the list of parameters and buffers"
        self.stop(f"{name} was changed by something other than this private run. {_NEXT}")

    def stop(self, sentence: str) -> NoReturn:
        """Raise `LearningStep`, now and whenever it is asked, until a change is declared public."""
        self._stopped = sentence
        raise LearningStep(sentence)

    def declare(self, reason: str) -> None:
        """Allow every change up to now: no private record had a part in it, because of `reason`."""
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(
                f"reason must say in words why the change is public, got {reason!r:.80}."
            )
        if reason not in self.declared:
            self.declared.append(reason)
        self._stopped = ""
        if self._held is not None:
            self.mark()

    def _now(self) -> list[Tensor]:
        """Return views of some bytes of each place; they are made anew where memory has moved."""
        addresses = [t.data_ptr() for t in self._places.values()]
        if addresses != self._addresses:
            self._bytes, self._addresses = [_some(t) for t in self._places.values()], addresses
        return self._bytes


def _places(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what is compared: parameters, and buffers of real numbers that are saved."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        is_compared = isinstance(tensor, nn.Parameter) or (
            isinstance(tensor, Tensor) and tensor.is_floating_point()
        )
        here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if is_compared and here.layout == torch.strided and here.numel():
            yield name, here


def _some(tensor: Tensor) -> Tensor:
    """Return a view of some bytes of a tensor, in the order of its memory; of all, if few."""
    here = tensor.detach()
    here = here.permute(sorted(range(here.dim()), key=lambda axis: -here.stride(axis)))
    flat = here.flatten().view(torch.uint8)
    return flat[:: 1 if len(flat) <= _FEW else len(flat) // _SOME | 1]


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.to(parts[0].device) for part in parts])

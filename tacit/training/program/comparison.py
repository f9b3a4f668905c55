"""The known-answer test of a program, before anything is paid: on synthetic records alone.

Three ways to compute the same losses and gradients are compared: `loss_fn` on a whole lot,
`loss_fn` on one example after the other, and the traced program, mapped over the lot.

- If the first two differ, the program combines examples. Its releases would be private, but would
  mean something else than its author thinks, so it is refused, and the place is named.
- If the last two differ, the trace is not the program, as with a `torch.autograd.Function` that has
  a backward of its own. The program then runs record by record.

Tolerances follow from rounding as it is measured: the relative change r of a result when each
parameter of a copy in float64 is moved by one unit in the last place, or the difference to that
copy. Results may differ by sqrt(r), half of the digits that rounding leaves.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tacit.errors import IncompatibleModel
from tacit.training import record_loop
from tacit.training.clipping.clip import Clip, ClippedSum, trainable
from tacit.training.examples import Examples, clip_and_sum, losses_of
from tacit.training.lots.memory_limit import available_memory
from tacit.training.noise.key import randomness
from tacit.training.program.first_difference import first_difference
from tacit.training.program.one_example import WRITES
from tacit.training.program.python_state import Kept, PythonState
from tacit.training.program.replayed_draws import LotDraws
from tacit.training.rules.operands import Unsupported
from tacit.training.torch_internals import TorchDispatchMode, version_of
from tacit.training.tree import (
    Batch,
    LossFn,
    is_out_of_memory,
    map_rows,
    n_rows,
    require_gradient,
    take_rows,
    with_rows,
)

EXAMPLES = 3  # odd and few; a lot of the usual size is compared too
_VALUES = (1000, 100, 10, 5, 3, 2)  # integers are random below the largest of these that runs
_MEANING = (
    "loss_fn gives other {} for a lot than for its examples one by one: something in it combines "
    "examples. Each example is clipped alone, so this program would not be trained as written. {}"
)
_ELSEWHERE = {
    "losses": "It could not be traced to one operator.",
    "gradients": "The losses are the same, so it happens in the backward pass: in a "
    "torch.autograd.Function, in a hook on gradients, or in terms that cancel but for detach().",
}
_OTHER_GRADIENTS = (
    "its gradients would be others than those of loss_fn, as where a torch.autograd.Function has a "
    "backward of its own"
)
_FLOAT = torch.finfo(torch.float32).eps
_UNREPEATABLE = 0.01  # relative change by an ulp or by numbers that cannot be drawn again
Engine = Callable[[Examples, Clip], ClippedSum]
T = TypeVar("T")


class _Found(NamedTuple):
    """Losses, and gradients of their sum, of one run."""

    losses: Tensor
    gradients: list[Tensor]


@dataclass
class Comparison:
    """A program and the state of Python from which every run of it begins.

    `double` is a copy of the model in float64, or None if there is none.
    """

    model: nn.Module
    loss_fn: LossFn
    views: int
    double: nn.Module | None = None
    draws: LotDraws = field(default_factory=lambda: LotDraws(EXAMPLES))
    rounding: float = 0.0  # relative change of results by one unit in the last place
    unit: float = 0.0  # the same in the precision of the run
    draws_in_python: bool = False
    has_run: bool = False  # on synthetic examples
    alone: list[_Found] = field(default_factory=list)  # what examples give, exactly if possible

    def __post_init__(self) -> None:
        self._state = PythonState(self.loss_fn, self.model)
        self._kept = self._state.now()
        self._buffers = [(b, version_of(b), b.detach().clone()) for b in self.model.buffers()]

    def begin(self) -> None:
        """Put Python's values, generators and buffers back to those of the start."""
        self._state.put_back(self._kept)
        for number, (buffer, version, value) in enumerate(self._buffers):
            if version_of(buffer) != version:
                buffer.data.copy_(value)
                self._buffers[number] = buffer, version_of(buffer), value

    # Synthetic records ---------------------------------------------------------------------------

    def synthetic(self, blank: Batch) -> Batch:
        """Return a lot of random examples, of the shapes and types in `blank`, that runs.

        Floating-point numbers are normal, or uniform if only these give a finite loss.
        """
        lot = blank
        for draw in (torch.randn, torch.rand):
            lot = random_lot(blank, draw)
            for tensor in with_rows(lot)[0]:
                if not (tensor.is_floating_point() or tensor.is_complex()):
                    self._fill(tensor, lot)
            if self._runs(lot):
                self.has_run = True
                break
        return lot

    def _fill(self, tensor: Tensor, lot: Batch) -> None:
        most = 1 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max
        for number in _VALUES:
            if number - 1 <= most:
                tensor.copy_(torch.randint(number, tensor.shape, device=tensor.device))
                if self._runs(lot):
                    return
        tensor.fill_(1)
        if not self._runs(lot):
            tensor.zero_()

    def _runs(self, lot: Batch) -> bool:
        """Return whether the program gives finite losses for a lot."""
        self.begin()
        try:
            with _within_bounds(lot):
                losses = self._losses(self.model, lot)
        except Exception:  # the user's code decides which values it accepts
            return False
        return bool(losses.isfinite().all())

    # Runs ----------------------------------------------------------------------------------------

    def _losses(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.enable_grad(), self._types_of(model):
            losses = losses_of(self.loss_fn, model, batch, n_rows(batch))
            require_gradient(losses)
            return losses

    @contextmanager
    def _types_of(self, model: nn.Module) -> Iterator[None]:
        """Make float64 the default of new tensors while the copy in float64 runs."""
        default = torch.get_default_dtype()
        if model is self.double:
            torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)

    def _run(self, model: nn.Module, batch: Batch, draws: AbstractContextManager[Any]) -> _Found:
        self.begin()
        with draws:
            losses = self._losses(model, batch)
            targets = list(trainable(model).values())
            gradients = record_loop.gradients_of(losses.sum(), targets)
        return _Found(losses.detach(), [g.detach().to_dense() for g in gradients])

    def _one_by_one(self, model: nn.Module, lot: Batch) -> list[_Found]:
        """Return what the examples of a lot give, each as a lot of its own."""
        return [
            self._run(model, self._example(lot, i), self.draws.of_example(i))
            for i in range(EXAMPLES)
        ]

    def _example(self, batch: Batch, number: int) -> Batch:
        return take_rows(batch, number * self.views, (number + 1) * self.views)

    def require_same_meaning(self, lot: Batch) -> None:
        """Raise `IncompatibleModel` unless a lot has the losses and gradients of its examples."""
        try:
            if self.double is not None:
                self._require_same_meaning(self.double, _as_double(lot))
                return
        except IncompatibleModel:
            raise
        except Exception:  # it has types of its own
            self.double = None
        self._require_same_meaning(self.model, lot)

    def _require_same_meaning(self, model: nn.Module, lot: Batch) -> None:
        draws = self.draws
        whole = self._run(model, lot, draws.recorded())
        drawn = [name for name in self._state.drawn(self._kept) if not name.startswith("torch")]
        self.draws_in_python = bool(drawn)
        if model is self.double:
            _move_by_an_ulp(model)
        again = self._run(model, lot, draws.again())
        roundings = [max(_unit(model), _change(*pair)) for pair in _pairs(whole, again)]
        self.rounding = max(roundings)
        if self.rounding > _UNREPEATABLE:
            return
        if self.draws_in_python:
            self._require_first_alone(model, lot, draws, roundings[0])
            return
        try:
            alone = self.alone = self._one_by_one(model, lot)
        except IncompatibleModel:
            raise
        except Exception as error:  # though the whole lot runs
            raise self._refusal("losses", model, lot, draws) from error
        losses = torch.cat([found.losses for found in alone])
        sums = [torch.stack(g).sum(0) for g in zip(*(f.gradients for f in alone), strict=True)]
        if _differ([again.losses], [losses], roundings[0]):
            raise self._refusal("losses", model, lot, draws)
        if _differ(again.gradients, sums, roundings[1]):
            raise self._refusal("gradients", model, lot, draws)

    def _require_first_alone(
        self, model: nn.Module, lot: Batch, draws: LotDraws, rounding: float
    ) -> None:
        """Raise `IncompatibleModel` if the first example's loss changes with the other examples.

        For programs that draw in Python, where examples alone draw other numbers.
        """
        others = map_rows(lambda t: _replaced(t, self.views), lot)
        before, after = (
            self._run(model, batch, draws.again()).losses[: self.views] for batch in (lot, others)
        )
        if _differ([before], [after], rounding):
            raise self._refusal("losses", model, lot, draws)

    def _refusal(
        self, what: str, model: nn.Module, lot: Batch, draws: LotDraws
    ) -> IncompatibleModel:
        """Return the error that names where a lot first differs from its examples."""

        def run(batch: Batch, part: AbstractContextManager[Any]) -> None:
            self.begin()
            with part:
                self._losses(model, batch)

        alone = [
            partial(run, self._example(lot, i), draws.of_example(i)) for i in range(draws.examples)
        ]
        whole = partial(run, lot, draws.again())
        place = first_difference(model, whole, alone, math.sqrt(self.rounding))
        return IncompatibleModel(_MEANING.format(what, place or _ELSEWHERE[what]))

    # The traced program --------------------------------------------------------------------------

    def why_not_the_program(self, engine: Engine, clip: Clip, lot: Batch, *, bounded: bool) -> str:
        """Return why an engine cannot take the place of `loss_fn`, by its clipped sum; or ""."""
        if self.draws_in_python or self.rounding > _UNREPEATABLE:
            return ""  # each call draws other numbers
        try:
            found = self._sum(engine, clip, lot, self.draws.of_all(), bounded=bounded).sums
        except Unsupported as error:
            return error.reason
        except (RuntimeError, NotImplementedError) as error:
            if is_out_of_memory(error):
                raise
            return f"it cannot be mapped over examples ({str(error).strip().partition('. ')[0]})"
        exact, self.unit = self._clipped(self.alone, clip), _unit(self.model)
        if self.double is not None:
            rounded = self._clipped(self._one_by_one(self.model, lot), clip)
            self.unit = max(self.unit, _change(_joined(exact), _joined(rounded)))
        names = list(exact)
        if _differ([found[n] for n in names], [exact[n] for n in names], self.unit):
            return _OTHER_GRADIENTS
        return ""

    def _clipped(self, alone: list[_Found], clip: Clip) -> dict[str, Tensor]:
        rows = zip(*(found.gradients for found in alone), strict=True)
        gradients = {
            name: torch.stack(own) / self.views
            for name, own in zip(trainable(self.model), rows, strict=True)
        }
        mask = torch.ones(len(alone), dtype=torch.bool, device=alone[0].losses.device)
        return clip_and_sum(gradients, clip, mask).sums

    def _sum(
        self,
        engine: Callable[[Examples, Clip], T],
        clip: Clip,
        lot: Batch,
        draws: AbstractContextManager[Any],
        *,
        bounded: bool = False,
    ) -> T:
        self.begin()
        mask = torch.ones(
            n_rows(lot) // self.views, dtype=torch.bool, device=with_rows(lot)[0][0].device
        )
        with draws:
            examples = Examples(self.model, self.loss_fn, lot, mask, self.views, bounded)
            return engine(examples, clip)

    def require_usual_size(
        self,
        losses: Callable[[Examples, Clip], Tensor] | None,
        clip: Clip,
        lot: Batch,
        examples: int,
    ) -> None:
        """Raise `IncompatibleModel` if a lot of usual size has other losses than its examples.

        `losses` computes those of the examples; None if they run one by one. Not tried if the
        program draws numbers that cannot be given to its examples.
        """
        draws, rounding = LotDraws(examples), max(self.unit, self.rounding, _unit(self.model))
        if self.rounding > _UNREPEATABLE or not self.draws.is_matched:
            return
        self.rounding = rounding
        lot = map_rows(lambda t: _fresh(t, (examples * self.views, *t.shape[1:])), lot)
        if self.draws_in_python:
            self._require_first_alone(self.model, lot, draws, rounding)
            return
        self.begin()
        with draws.recorded():
            whole = self._losses(self.model, lot).detach()
        if losses is not None:
            whole = whole.view(-1, self.views).mean(1)
            alone = self._sum(losses, clip, lot, draws.of_all())
        else:
            parts = []
            for number in range(examples):
                self.begin()
                with draws.of_example(number):
                    parts.append(self._losses(self.model, self._example(lot, number)).detach())
            alone = torch.cat(parts)
        if _differ([whole], [alone], rounding):
            raise self._refusal("losses", self.model, lot, draws)

    # The loop ------------------------------------------------------------------------------------

    def require_no_memory(self, lot: Batch, *, is_traced: bool) -> None:
        """Raise `IncompatibleModel` if a call of the program keeps something of its record.

        A list that is only appended to may stay, unless the next call reads it. Values that do not
        depend on the record, such as a counter, may change. A program that is traced may keep what
        it likes, since nothing of a record reaches it, but not for the next call.
        """
        first, second, third = (self._example(lot, number) for number in range(3))
        before = [(label, t, version_of(t)) for label, t in self._state.held()]
        self._run(self.model, first, nullcontext())
        after = self._state.now()
        if written := [label for label, t, version in before if version_of(t) != version]:
            raise IncompatibleModel(WRITES.format(", ".join(written)))
        self._run(self.model, second, nullcontext())
        kept = self._state.changed(after)
        lists = self._state.only_appended(self._kept)
        if is_traced:
            losses = []
            for _ in range(2):  # after the second, and after the first
                with randomness(0, with_rows(lot)[0][0].device):
                    losses.append(self._losses(self.model, third).detach())
                self._state.put_back(after)
            if not _differ(losses[:1], losses[1:], _epsilon(losses[0])):
                return
        else:
            kept = [name for name in kept if name not in lists]
            kept += self._hidden(first, third, after, lists)
        if kept:
            raise IncompatibleModel(
                f"a call of loss_fn keeps something of its record in {', '.join(kept)}, which "
                "would reach the next record. Compute it from the record alone, or append it to a "
                "list that nothing reads."
            )

    def _hidden(self, first: Batch, third: Batch, after: Kept, lists: set[str]) -> list[str]:
        """Return where a call leaves something that the next one's losses show."""
        # Both times, what is left in a place that is not seen is left by this record itself.
        _, fresh, again = (self._run(self.model, third, nullcontext()).losses for _ in range(3))
        self._run(self.model, first, nullcontext())
        hidden = self._run(self.model, third, nullcontext()).losses
        self._state.put_back(after)
        with randomness(0, hidden.device):
            listed = self._losses(self.model, third).detach()
        unit = _epsilon(again)
        if _differ([fresh], [again], unit):  # it draws numbers that cannot be repeated
            return []
        if _differ([hidden], [again], unit):
            return ["a place that cannot be named, such as a file"]
        return sorted(lists) if _differ([listed], [again], unit) else []

    def cost_of_loop(self, clip: Clip, lot: Batch) -> float:
        """Return the time of records one by one over that of a plain step, measured."""
        many = map_rows(lambda t: torch.cat([t] * 6), lot)
        times = []
        for run in (
            lambda: self._sum(record_loop.run, clip, lot, nullcontext()),
            lambda: self._run(self.model, many, nullcontext()),
        ):
            run()
            began = time.process_time()
            run()
            times.append(time.process_time() - began)
        return 6 * times[0] / max(times[1], 1e-9)


def require_same_alone(
    name: str, call: Callable[[Any], Batch], whole: Any, alone: Sequence[Any], device: torch.device
) -> None:
    """Raise `IncompatibleModel` unless `call` gives a lot what it gives its examples one by one.

    `call` is `augment` or `collate_fn`, which make batches. Nothing is said if it cannot be
    repeated, or does not take synthetic records.
    """
    draws = LotDraws(len(alone))

    def rows(values: Any, part: AbstractContextManager[Any]) -> list[Tensor]:
        with randomness(0, device), part:
            return with_rows(call(values))[0]

    try:
        first, again = rows(whole, draws.recorded()), rows(whole, draws.again())
        parts = [rows(values, draws.of_example(i)) for i, values in enumerate(alone)]
    except Exception:
        return
    found = [torch.cat(own) for own in zip(*parts, strict=True)]
    if any(not torch.equal(*pair) for pair in zip(first, again, strict=True)):
        return
    pairs = zip(first, found, strict=True)
    if any(a.shape != b.shape or _differ([a], [b], _FLOAT) for a, b in pairs):
        raise IncompatibleModel(
            f"{name} makes something else of records together than of each alone, so the program "
            f"would not be trained as written: {name} is called on one record at a time. Let it "
            "treat each record by itself."
        )


# Copies in float64 --------------------------------------------------------------------------------


def in_double(model: nn.Module) -> nn.Module | None:
    """Return a copy of a model in float64; None if it takes much memory or cannot be copied."""
    needed = 8 * sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    if needed > available_memory(next(model.parameters()).device) // 4:
        return None
    try:
        return copy.deepcopy(model).double()
    except Exception:  # quantized weights, shards, and what else cannot be copied
        return None


def _move_by_an_ulp(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.mul_(1 + _epsilon(p) * torch.randn_like(p).sign())


def _epsilon(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def _unit(model: nn.Module) -> float:
    return max(_epsilon(p) for p in model.parameters())


# Differences --------------------------------------------------------------------------------------


def _pairs(a: _Found, b: _Found) -> list[tuple[Tensor, Tensor]]:
    joined = [torch.cat([g.flatten() for g in f.gradients]) for f in (a, b)]
    return [(a.losses, b.losses), (joined[0], joined[1])]


def _joined(sums: dict[str, Tensor]) -> Tensor:
    return torch.cat([sums[name].double().flatten() for name in sorted(sums)])


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double().nan_to_num(0.0, 0.0, 0.0)))


def _change(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference over that of `a`."""
    norm = _norm(a)
    return _norm(a.double() - b.double()) / norm if norm else 0.0


def _differ(found: Sequence[Tensor], expected: Sequence[Tensor], rounding: float) -> bool:
    """Return whether tensors differ by more than half of the digits that rounding leaves.

    A tensor may differ by sqrt(r) of its own norm, and by r^(3/4) of the norm of all: a gradient
    that is exactly zero, such as that of a key's bias in attention, consists of rounding.
    """
    total = math.sqrt(sum(_norm(e) ** 2 for e in expected))
    for f, e in zip(found, expected, strict=True):
        f, e = f.to_dense().double(), e.to_dense().double()
        if not torch.equal(f.isfinite(), e.isfinite()):
            return True
        limit = math.sqrt(rounding) * (_norm(e) + rounding**0.25 * total)
        if _norm(f - e) > limit:
            return True
    return False


# Values -------------------------------------------------------------------------------------------


def random_lot(blank: Batch, draw: Callable[..., Tensor] = torch.randn) -> Batch:
    """Return examples like the one in `blank` with random numbers; integers are 0."""

    def drawn(t: Tensor) -> Tensor:
        shape = EXAMPLES * t.shape[0], *t.shape[1:]
        if t.is_floating_point() or t.is_complex():
            return draw(shape, dtype=t.dtype, device=t.device)
        return torch.zeros(shape, dtype=t.dtype, device=t.device)

    return map_rows(drawn, blank)


def _as_double(batch: Batch) -> Batch:
    return map_rows(lambda t: t.double() if t.is_floating_point() else t, batch)


def resampled_like(batch: Batch, blank: Batch) -> Batch:
    """Return a batch of the shapes in `blank` with the values that `batch` holds."""
    tensors, rebuild = with_rows(blank)
    pairs = zip(with_rows(batch)[0], tensors, strict=True)
    return rebuild([_resampled(values, like.shape) for values, like in pairs])


def _replaced(tensor: Tensor, kept: int) -> Tensor:
    """Return a lot of which the first `kept` rows stay, and the others hold other values."""
    return torch.cat([tensor[:kept], _resampled(tensor, tensor[kept:].shape)])


def _fresh(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return numbers like those of `tensor`; floating-point numbers are drawn anew."""
    if not tensor.is_floating_point():
        return _resampled(tensor, shape)
    draw = torch.rand if bool((tensor >= 0).all()) else torch.randn
    return draw(tuple(shape), dtype=tensor.dtype, device=tensor.device)


def _resampled(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    places = torch.randint(max(1, tensor.numel()), tuple(shape), device=tensor.device)
    return tensor.flatten()[places] if tensor.numel() else tensor.new_zeros(places.shape)


def _within_bounds(lot: Batch) -> AbstractContextManager[Any]:
    """Return a context in which a GPU raises for an index out of bounds, which ends its process."""
    return _IndexGuard() if with_rows(lot)[0][0].is_cuda else nullcontext()


class _IndexGuard(TorchDispatchMode):
    """Raises `IndexError` where an operator would read or write out of bounds."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        pairs: list[tuple[Any, int]] = []
        if name == "embedding":
            pairs = [(args[1], args[0].shape[0])]
        elif name in ("index", "index_put", "index_put_", "_unsafe_index"):
            pairs = list(zip(args[1], args[0].shape, strict=False))
        elif name in ("gather", "scatter", "scatter_", "scatter_add", "index_select", "index_add"):
            pairs = [(args[2], args[0].shape[args[1]] if args[0].dim() else 1)]
        elif name.startswith("nll_loss"):
            axis = 1 if args[0].dim() > 1 else 0
            kept = args[1][args[1] != (args[4] if len(args) > 4 else -100)]
            pairs = [(kept, args[0].shape[axis])]
        for index, size in pairs:
            is_index = isinstance(index, Tensor) and index.dtype != torch.bool and index.numel()
            if is_index and not bool(((index >= -size) & (index < size)).all()):
                raise IndexError(f"an index of {name} is out of bounds")
        return func(*args, **kwargs)

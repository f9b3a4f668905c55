"""The traced programs of a run: one for each shape that an example can have.

Python values that a program reads are part of its graph, so the graph must be made again when they
change. Before each lot, `begin_lot` compares them (`PythonState`) and traces again if they changed.
A program that draws numbers in Python, counts its calls, or gives two different graphs, is *moving*
and is traced again for each lot.

What Python writes in a trace is put back, but for one trace in each lot of a moving program: a
counter advances once in a step, a generator draws once. Values of tensors that a program stores are
put back in any case.
"""

import time
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import IncompatibleModel
from tacit.training.program import torch_internals
from tacit.training.program.one_by_one import OTHER_SHAPE, rest_of
from tacit.training.program.one_example import OneExample, Untraceable, traced
from tacit.training.program.python_state import Kept, Leftover, PythonState
from tacit.training.program.tensor_values import ASKED, TensorValues
from tacit.training.tree import Batch, LossFn, map_rows, map_tensors, with_rows

_latest: list["Programs"] = []  # of the last direct call of `clipped_sum`
_REGISTER = (
    "Make it a frozen parameter or a buffer (register_buffer) of the model, which are read anew."
)
_DIFFER = "Two traces of the program of one example"
_BY_ROW = (
    "it draws numbers in Python for each row of a batch, and one trace would give all examples the "
    "same ones"
)


class Programs:
    """The program of one example for every shape that was prepared.

    Parameters
    ----------
    private
        Tensors of the data set. A program that uses their memory other than as its batch is
        refused.

    Attributes
    ----------
    moving
        Why the program is traced again for each lot; "" if it is not.
    changed
        Names of the values that had changed when the last lot began. There is one warning if this
        happens in two lots in a row.
    traces
        Number of times that programs were made anew since the first, so that what was compiled from
        them can be dropped.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        views: int = 1,
        *,
        private: Iterable[Tensor] = (),
    ) -> None:
        self.model, self.loss_fn, self.views = model, loss_fn, views
        self.moving, self.traces = "", 0
        self.changed: list[str] = []
        self._private = {_memory_of(tensor) for tensor in private}
        self._shapes: dict[Any, Batch] = {}  # an example of zeros, by shapes
        self._programs: dict[Any, OneExample] = {}
        self._state, self._kept = self._now()  # when the programs were traced
        self._constants: dict[int, tuple[Tensor, int]] = {}  # with the version of each
        self._read: list[tuple[Tensor, int]] = []  # tensors whose values Python took
        self._draws = self._has_warned = False
        self._cost = 0.0

    @property
    def can_be_repeated(self) -> bool:
        """Whether the same Python values and generators give the same program again."""
        return not (self._draws or self.moving.startswith(_DIFFER))

    @classmethod
    def of(cls, model: nn.Module, loss_fn: LossFn, views: int) -> "Programs":
        """Return the programs of this model and loss; those of the last call alone are kept."""
        if _latest:
            last = _latest[0]
            if last.model is model and last.loss_fn == loss_fn and last.views == views:
                return last
        _latest[:] = [cls(model, loss_fn, views)]
        return _latest[0]

    def prepare(self, batch: Batch) -> None:
        """Trace the program of one example of the shapes in `batch`, unless it is known."""
        key = self._key(batch)
        if key not in self._shapes:
            one = map_rows(lambda t: torch.zeros_like(t[: self.views]), batch)
            self._keep(key, self._examined(one))
            self._shapes[key] = one

    def begin_lot(self) -> None:
        """Trace again if the program is moving, or if a Python value that it reads has changed.

        Call it once before the examples of a lot are summed, within the context that seeds the
        generators of the step.
        """
        before, self.changed = self.changed, [] if self.moving else self._changed()
        self._require_unchanged_constants()
        if not (self.moving or self.changed):
            return
        self.traces += 1
        self._programs.clear()
        self._read.clear()
        self._state, self._kept = self._now()
        key, one = next(iter(self._shapes.items()))
        if not self.moving:
            self._keep(key, self._examined(one))
            if before:  # a single change, such as of the mode, costs little
                names = _listed(self.changed)
                self._warn(f"{names} changed, which the program of one example reads")
        if self.moving:
            self._keep(key, self._trace(one, self._state, self._kept)[0])

    def program_of(self, batch: Batch) -> OneExample:
        """Return the program of examples with the shapes in `batch`."""
        key = self._key(batch)
        if key not in self._shapes:
            raise Untraceable(OTHER_SHAPE)
        if (key, _precision()) not in self._programs:  # the lot's first trace has written
            now = self._state.now()
            self._state.put_back(self._kept)
            try:
                self._keep(key, self._trace(self._shapes[key], self._state, self._kept)[0])
            finally:
                self._state.put_back(now)
        return self._programs[key, _precision()]

    def _key(self, batch: Batch) -> Any:
        tensors, _ = with_rows(batch)
        shapes = tuple((t.shape[1:], t.dtype, t.device) for t in tensors)
        return shapes, rest_of(batch)

    # Python values --------------------------------------------------------------------------------

    def _now(self) -> tuple[PythonState, Kept]:
        state = PythonState(self.loss_fn, self.model)
        return state, state.now()

    def _changed(self) -> list[str]:
        """Return the names of the Python values that have changed, if any has."""
        found = [
            f"the value of {self._name(t)}" for t, version in self._read if t._version != version
        ]
        if not self._state.is_same(self._kept):
            found += self._state.changed(self._kept)
            if not found:  # only what the program does not read
                self._kept = self._state.now()
        return found

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            again = "for each lot" if self.moving else "whenever such a value changes"
            warnings.warn(
                f"{what}, so it is traced again {again}, which took {self._cost:.2g} s.",
                RuntimeWarning,
                stacklevel=4,
            )

    # Traces ---------------------------------------------------------------------------------------

    def _examined(self, one: Batch) -> OneExample:
        """Return the program of an example; note whether it moves. All that it wrote is undone."""
        is_first = not self._shapes
        state, before = self._now()
        try:
            program, left = self._trace(one, state, before)
            reason = ""
            if is_first or state.changed(before) or state.drawn(before):
                reason = self._why_moving(one, program)
            state.put_back(before)
            if left:
                self._require_no_memory(one, state, left)
        finally:
            state.put_back(before)
        if is_first:
            self._state, self._kept = state, before
        if reason and not self.moving:
            self.moving = reason
            self._warn(reason)
        return program

    def _why_moving(self, one: Batch, first: OneExample) -> str:
        """Return why further traces, from the states that the former ones left, differ; or ""."""
        difference = ""
        for _ in range(2):  # what is built at the first call, such as compiled parts, is no change
            state, before = self._now()
            program, _ = self._trace(one, state, before)
            if names := state.drawn(before):
                ends = state.now()
                state.put_back(before)
                self._trace(map_rows(lambda t: torch.cat([t, t]), one), state, before, examples=2)
                if state.drawn(ends):
                    raise Untraceable(_BY_ROW)
                return f"The program of one example draws from the generator {_listed(names)}"
            if names := state.changed(before):
                return f"The program of one example changes {_listed(names)}"
            difference = _difference(first, program)
            if not difference:
                return ""
            first = program
        return f"{_DIFFER} differ in {difference}"

    def _require_no_memory(self, one: Batch, state: PythonState, left: list[Leftover]) -> None:
        """Raise if a call reads and replaces what the call before it computed."""
        made: dict[int, str] = {}

        def synthetic(label: str, tensor: Tensor) -> Tensor:
            if torch_internals.is_fake(tensor):
                tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                made[id(tensor)] = label
            return tensor

        for label, write, value in left:
            write(map_tensors(partial(synthetic, label), value))
        program, again = self._trace(one, state, state.now())
        read = {made.get(id(tensor)) for tensor in self._inputs(program)}
        if names := read & {label for label, _, _ in again}:
            raise IncompatibleModel(
                f"A call of loss_fn reads {_listed(sorted(map(str, names)))}, as the call before "
                "left it: records of one lot would reach the next one. Compute it from the "
                "batch alone."
            )

    def _trace(
        self, one: Batch, state: PythonState, before: Kept, *, examples: int = 1
    ) -> tuple[OneExample, list[Leftover]]:
        """Return the program of an example, and what it stored of tensors, which is put back."""
        draws, program = self._draws, None
        try:
            program = self._traced(one, examples, draws=draws)
        except Untraceable as error:
            state.put_back(before)
            if draws or ASKED not in error.reason:
                raise
        if program is None:  # perhaps a random number in a condition, which is drawn for real then
            program = self._traced(one, examples, draws=True)
            self._draws = True
        return program, state.clean(before)

    def _traced(self, one: Batch, examples: int, *, draws: bool) -> OneExample:
        values = TensorValues(self._state.tensors, draws=draws)
        began = time.perf_counter()

        def losses(model: nn.Module, batch: Batch) -> Tensor:
            return values.losses(self.loss_fn, model, batch)

        program = traced(self.model, losses, one, self.views * examples)
        self._cost = time.perf_counter() - began
        self._read += values.read
        return program

    # Tensors from outside -------------------------------------------------------------------------

    def _keep(self, key: Any, program: OneExample) -> None:
        """Keep a program; check and hold the tensors that it uses besides its batch."""
        for tensor in self._inputs(program):
            device, start, end = _memory_of(tensor)
            if any(device == d and start < e and s < end for d, s, e in self._private):
                raise IncompatibleModel(
                    f"The program uses {self._name(tensor)}, which holds memory of the data set: "
                    "all examples would see these records. Take values from the batch alone."
                )
        for tensor, version in program.constants:
            if any(tensor is own for own in program.trained):
                raise IncompatibleModel(
                    f"The program uses {self._name(tensor)}, which is trained but is no parameter "
                    "of the model, so its gradient would not be clipped. Make it a parameter of "
                    "the model, or call requires_grad_(False) on it."
                )
            if id(tensor) in self._state.tensors:  # else Python made it in the trace
                self._constants.setdefault(id(tensor), (tensor, version))
        self._programs[key, _precision()] = program

    def _inputs(self, program: OneExample) -> list[Tensor]:
        """Return the tensors besides parameters that a program takes from outside."""
        buffers = dict(self.model.named_buffers())
        held = [buffers[name] for name in program.names if name in buffers]
        return [*held, *(tensor for tensor, _ in program.constants)]

    def _require_unchanged_constants(self) -> None:
        for tensor, version in self._constants.values():
            if tensor._version != version:
                raise IncompatibleModel(
                    f"{self._name(tensor)} was changed after training was set up, but a tensor "
                    f"that the program uses from outside is held fixed. {_REGISTER}"
                )

    def _name(self, tensor: Tensor) -> str:
        return self._state.tensors.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)}")


def _difference(first: OneExample, second: OneExample) -> str:
    """Return where two graphs differ, in text; "" if they are the same."""
    one, other = list(first.graph.graph.nodes), list(second.graph.graph.nodes)
    for a, b in zip(one, other, strict=False):
        if a.op == b.op == "get_attr":
            u, v = getattr(first.graph, a.target), getattr(second.graph, b.target)
            if u is not v and not (u.shape == v.shape and torch.equal(u, v)):
                return f"the tensor {a.name}"
        elif (a.op, a.target) != (b.op, b.target):
            return f"an operator: {a.name} and {b.name}"
        elif repr((a.args, a.kwargs)) != repr((b.args, b.kwargs)):
            return f"the arguments of {a.name}"
    if first.names != second.names:
        return "the parameters that they use"
    return "" if len(one) == len(other) else "their length"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _precision() -> tuple[bool, torch.dtype]:
    """Return the autocast in which a step runs: traces and steps may be in different ones."""
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def _memory_of(tensor: Tensor) -> tuple[str, int, int]:
    """Return the device and the addresses of the memory that a tensor is a part of."""
    try:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        return str(tensor.device), start, start + storage.nbytes()
    except (RuntimeError, NotImplementedError):  # a tensor without memory of its own
        return str(tensor.device), 0, 0

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
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import IncompatibleModel
from tacit.training.lots.one_by_one import OTHER_SHAPE
from tacit.training.program.one_example import OneExample, Untraceable, memory_of, traced
from tacit.training.program.python_state import PythonState
from tacit.training.program.tensor_values import ASKED, TensorValues
from tacit.training.torch_internals import version_of
from tacit.training.tree import Batch, LossFn, form_of, map_rows, with_rows

_latest: list["Programs"] = []  # of the last direct call of `clipped_sum`
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
        self._private = {memory_of(tensor) for tensor in private}
        self._shapes: dict[Any, Batch] = {}  # an example of zeros, by shapes
        self._programs: dict[Any, OneExample] = {}
        self._look()
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
            if not self._shapes:
                self._examine(key, one)
            self._shapes[key] = one
            self.program_of(batch)

    def begin_lot(self) -> None:
        """Trace again if the program is moving, or if a Python value that it reads has changed.

        Call it once before the examples of a lot are summed, within the context that seeds the
        generators of the step.
        """
        before, self.changed = self.changed, [] if self.moving else self._changed()
        self._require_unchanged_constants()
        if not (self._shapes and (self.moving or self.changed)):
            return
        self.traces += 1
        self._programs.clear()
        self._read.clear()
        key, one = next(iter(self._shapes.items()))
        if self.changed:
            self._examine(key, one)
            if before:  # a single change, such as of the mode, costs little
                self._warn(
                    f"{_listed(self.changed)} changed, which the program of one example reads"
                )
        if self.moving:
            self._look()
            self._programs[key, _precision()] = self._trace(one)

    def program_of(self, batch: Batch) -> OneExample:
        """Return the program of examples with the shapes in `batch`."""
        key = self._key(batch)
        if key not in self._shapes:
            raise Untraceable(OTHER_SHAPE)
        if (key, _precision()) not in self._programs:  # the lot's first trace has written
            now = self._state.now()
            self._state.put_back(self._kept)
            try:
                self._programs[key, _precision()] = self._trace(self._shapes[key])
            finally:
                self._state.put_back(now)
        return self._programs[key, _precision()]

    def _key(self, batch: Batch) -> Any:
        tensors, _ = with_rows(batch)
        shapes = tuple((t.shape[1:], t.dtype, t.device) for t in tensors)
        return shapes, form_of(batch)

    # Python values --------------------------------------------------------------------------------

    def _look(self) -> None:
        """Note the Python values from which the program is traced."""
        self._state = PythonState(self.loss_fn, self.model)
        self._kept = self._state.now()

    def _changed(self) -> list[str]:
        """Return the names of the Python values that have changed, if any has."""
        found = [
            f"the value of {self._name(t)}" for t, version in self._read if version_of(t) != version
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

    def _examine(self, key: Any, one: Batch) -> None:
        """Trace the program until it is known whether it moves; undo all that it writes."""
        self._look()
        state, start = self._state, self._kept
        try:
            self._programs[key, _precision()] = self._trace(one)
            self.moving = self._why_moving(one, self._programs[key, _precision()])
        finally:
            state.put_back(start)
            self._state, self._kept = state, start
        if self.moving:
            self._warn(self.moving)

    def _why_moving(self, one: Batch, first: OneExample) -> str:
        """Return why further traces, from the states that the former ones left, differ; or ""."""
        difference = ""
        for _ in range(2):  # what is built at the first call, such as compiled parts, is no change
            self._look()
            state, before = self._state, self._kept
            program = self._trace(one)
            if names := state.drawn(before):
                ends = state.now()
                state.put_back(before)
                self._trace(map_rows(lambda t: torch.cat([t, t]), one), examples=2)
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

    def _trace(self, one: Batch, examples: int = 1) -> OneExample:
        """Return the program of an example; what it stores of tensors is put back."""
        try:
            program = self._traced(one, examples)
        except Untraceable as error:
            self._state.put_back(self._kept)
            if self._draws or ASKED not in error.reason:
                raise
            self._draws = True  # perhaps a random number in a condition is drawn for real then
            try:
                program = self._traced(one, examples)
            except Untraceable:
                self._state.put_back(self._kept)
                raise error from None
        self._state.clean(self._kept)
        self._hold(program)
        return program

    def _traced(self, one: Batch, examples: int) -> OneExample:
        values = TensorValues(draws=self._draws)
        began = time.perf_counter()

        def losses(model: nn.Module, batch: Batch) -> Tensor:
            return values.losses(self.loss_fn, model, batch)

        program = traced(self.model, losses, one, self.views * examples)
        self._cost = time.perf_counter() - began
        self._read += values.read
        return program

    # Tensors from outside -------------------------------------------------------------------------

    def _hold(self, program: OneExample) -> None:
        """Check and hold fixed the tensors that a program uses besides its batch."""
        buffers = dict(self.model.named_buffers())
        held = [buffers[name] for name in program.names if name in buffers]
        for tensor in (*held, *(tensor for tensor, _ in program.constants)):
            if memory_of(tensor) in self._private:
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

    def _require_unchanged_constants(self) -> None:
        for tensor, version in self._constants.values():
            if version_of(tensor) != version:
                raise IncompatibleModel(
                    f"{self._name(tensor)} was changed after training was set up, but a tensor "
                    "that the program uses from outside is held fixed. Register it as a buffer of "
                    "the model (register_buffer): buffers are read at each step."
                )

    def _name(self, tensor: Tensor) -> str:
        return self._state.tensors.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)}")


def _difference(first: OneExample, second: OneExample) -> str:
    """Return where two graphs differ, in text; "" if they are the same."""
    lines = [program.graph.code.splitlines() for program in (first, second)]
    if lines[0] != lines[1]:
        different = (b.strip() for a, b in zip(*lines, strict=False) if a != b)
        return f"`{next(different, 'their length')}`"
    pairs = zip(first.constants, second.constants, strict=True)
    is_same = all(a is b or torch.equal(a, b) for (a, _), (b, _) in pairs)
    return "" if is_same and first.names == second.names else "the tensors that they use"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _precision() -> tuple[bool, torch.dtype]:
    """Return the autocast in which a step runs: traces and steps may be in different ones."""
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

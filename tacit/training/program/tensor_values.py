"""What a program gets that asks for the value of a tensor while it is traced.

`.item()` and `.tolist()` give numbers that may be printed and stored. In a condition, or in
arithmetic with tensors, they raise `Untraceable`, as `float()`, `int()` and `bool()` of a tensor
do. The reason names the line of the user's code.
"""

import linecache
import math
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tacit.errors import TacitError
from tacit.training.program import torch_internals
from tacit.training.program.constant_values import constant_value
from tacit.training.program.one_example import Untraceable
from tacit.training.tree import Batch, LossFn

_VALUES: set[Any] = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__}
_VALUES |= {Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__}
_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]  # a descriptor
_DRAWS: set[Any] = {torch.rand, torch.randn, torch.randint}
_LIBRARIES = (str(Path(torch.__path__[0])), str(Path(__file__).parents[2]))
_WRITES = {"__setitem__", *(f"__i{n}__" for n in ("add", "sub", "mul", "truediv", "and", "or"))}
ASKED = "it needs the value of a tensor, as in a condition, in float() or by .item()"


class Placeholder(float):
    """The value of a tensor while tracing: not a number, which may be printed or stored."""

    def __new__(cls) -> "Placeholder":
        """Make the placeholder of any number."""
        return super().__new__(cls, math.nan)

    def _asked(self, *_: Any) -> NoReturn:
        raise Untraceable(ASKED)

    def _computed(self, *others: Any) -> "Placeholder":
        if all(isinstance(other, int | float) for other in others):
            return self
        return NotImplemented

    __hash__ = float.__hash__


for _names, _body in (
    ("bool lt le gt ge eq ne int trunc floor ceil", Placeholder._asked),
    ("add sub mul truediv floordiv mod pow neg pos abs round", Placeholder._computed),
    ("radd rsub rmul rtruediv rfloordiv rmod rpow", Placeholder._computed),
):
    for _name in _names.split():
        setattr(Placeholder, f"__{_name}__", _body)


class TensorValues(TorchFunctionMode):
    """Watches what a program that is traced does with the values of tensors.

    Parameters
    ----------
    names
        Names of tensors from outside, by their id.
    draws
        Whether single random numbers are drawn for real, for programs that branch on them.

    Attributes
    ----------
    read
        Tensors from outside whose values the program took, each with its version.
    """

    def __init__(self, names: dict[int, str], *, draws: bool) -> None:
        super().__init__()
        self.names, self.draws = names, draws
        self.read: list[tuple[Tensor, int]] = []
        self._is_given = False

    def losses(self, loss_fn: LossFn, model: nn.Module, batch: Batch) -> Tensor:
        """Return `loss_fn(model, batch)`; raise `Untraceable` if it cannot be traced.

        Errors that are raised outside of torch are the program's own, and left as they are.
        """
        try:
            with self:
                return loss_fn(model, batch)
        except Exception as error:
            frame, _ = list(traceback.walk_tb(error.__traceback__))[-1]
            is_own = not (self._is_given or frame.f_code.co_filename.startswith(_LIBRARIES))
            if not isinstance(error, Untraceable) and (is_own or isinstance(error, TacitError)):
                raise
            raise Untraceable(self._what(error) + where(error)) from error

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # of torch's protocol
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one function of torch."""
        kwargs = kwargs or {}
        if func == _DATA:
            func = Tensor.detach
        if self._is_given and _has_placeholder((*args, *kwargs.values())):
            raise Untraceable(f"{ASKED}, in {_name_of(func)}")
        is_outside = (
            bool(args) and isinstance(args[0], Tensor) and not torch_internals.is_fake(args[0])
        )
        if is_outside and func in _VALUES:
            self.read.append((args[0], args[0]._version))
        elif func in _VALUES and (known := constant_value(args[0])) is not None:
            self.read += [(tensor, tensor._version) for tensor in known[1]]
            with torch_internals.untraced():
                return func(known[0], *args[1:], **kwargs)
        if is_outside and _writes(_name_of(func)):
            name = self.names.get(id(args[0]), "a tensor")
            raise Untraceable(f"the program writes into {name}, which all examples share")
        found = func(*args, **kwargs)
        if func in (Tensor.item, Tensor.tolist):
            return self._placeholders(found)
        if isinstance(found, Tensor):
            if any(type(size) is not int for size in found.shape):
                raise Untraceable(f"the shape that {_name_of(func)} gives depends on values")
            if self.draws and func in _DRAWS and found.numel() == 1:
                with torch_internals.untraced():
                    number = func(*args, **kwargs).tolist()
                return torch.tensor(number, dtype=found.dtype, device=found.device)
        return found

    def _placeholders(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._placeholders(v) for v in value]
        if isinstance(value, int | float | complex):
            return value
        self._is_given = True
        return Placeholder()

    def _what(self, error: Exception) -> str:
        if isinstance(error, Untraceable):
            return error.reason
        if isinstance(error, torch_internals.ASKS_FOR_VALUES):
            operator = getattr(error, "func", None)
            return f"{ASKED}, in {operator}" if operator else ASKED
        text = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {text}"


def where(error: BaseException) -> str:
    """Return the last line outside of torch and this library that `error` passed, as text."""
    return _line(reversed(list(traceback.walk_tb(error.__traceback__))))


def line_of(frame: FrameType) -> str:
    """Return the innermost line outside of torch and this library that led to `frame`, as text."""
    return _line(traceback.walk_stack(frame))


def _line(frames: Iterable[tuple[FrameType, int]]) -> str:
    for frame, line in frames:
        file = frame.f_code.co_filename
        if not file.startswith((*_LIBRARIES, "<frozen")):
            source = linecache.getline(file, line).strip()
            return f", at {file}:{line}" + (f" (`{source}`)" if source else "")
    return ""


def _writes(name: str) -> bool:
    is_plain = name.endswith("_") and not name.startswith("_")
    return name in _WRITES or (is_plain and name != "requires_grad_")


def _has_placeholder(values: Any) -> bool:
    for value in values:
        if isinstance(value, tuple | list):
            if _has_placeholder(value):
                return True
        elif isinstance(value, float) and math.isnan(value):  # also what C functions made of one
            return True
    return False


def _name_of(func: Any) -> str:
    return getattr(func, "__name__", str(func))

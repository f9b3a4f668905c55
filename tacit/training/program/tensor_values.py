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
from tacit.training import torch_internals
from tacit.training.torch_internals import Untraceable, version_of
from tacit.training.tree import Batch, LossFn

_VALUES: set[Any] = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__}
_VALUES |= {Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__}
_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]  # a descriptor
_DRAWS: set[Any] = {torch.rand, torch.randn, torch.randint}
_LIBRARIES = (str(Path(torch.__path__[0])), str(Path(__file__).parents[2]))
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


def is_placeholder(value: Any) -> bool:  # Any: whatever a program holds
    """Return whether a value is a placeholder, or what a function in C made of one."""
    return isinstance(value, float) and math.isnan(value)


class TensorValues(TorchFunctionMode):
    """Watches what a program that is traced does with the values of tensors.

    Parameters
    ----------
    draws
        Whether single random numbers are drawn for real, for programs that branch on them.

    Attributes
    ----------
    read
        Tensors from outside whose values the program took, each with its version.
    """

    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        self.draws = draws
        self.read: list[tuple[Tensor, int]] = []
        self._is_given = False

    def losses(self, loss_fn: LossFn, model: nn.Module, batch: Batch) -> Tensor:
        """Return `loss_fn(model, batch)`; raise `Untraceable`, with the line, if it fails."""
        try:
            with self:
                return loss_fn(model, batch)
        except Exception as error:
            if isinstance(error, TacitError) and not isinstance(error, Untraceable):
                raise
            raise Untraceable(_what(error) + where(error)) from error

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
            raise Untraceable(f"{ASKED}, in {func.__name__}")
        if func in _VALUES and not torch_internals.is_fake(args[0]):
            self.read.append((args[0], version_of(args[0])))
        found = func(*args, **kwargs)
        if func in (Tensor.item, Tensor.tolist):
            return self._placeholders(found)
        if isinstance(found, Tensor) and any(type(size) is not int for size in found.shape):
            raise Untraceable(f"the shape that {func.__name__} gives depends on values")
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


def where(error: BaseException) -> str:
    """Return the last line outside of torch and this library that `error` passed, as text."""
    return _line(reversed(list(traceback.walk_tb(error.__traceback__))))


def line_of() -> str:
    """Return the innermost line outside of torch and this library that led here, as text."""
    return _line(traceback.walk_stack(None))


def _line(frames: Iterable[tuple[FrameType, int]]) -> str:
    for frame, line in frames:
        file = frame.f_code.co_filename
        if not file.startswith((*_LIBRARIES, "<frozen")):
            source = linecache.getline(file, line).strip()
            return f", at {file}:{line}" + (f" (`{source}`)" if source else "")
    return ""


def _what(error: Exception) -> str:
    if isinstance(error, Untraceable):
        return error.reason
    if isinstance(error, torch_internals.ASKS_FOR_VALUES):
        operator = getattr(error, "func", None)
        return f"{ASKED}, in {operator}" if operator else ASKED
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"


def _has_placeholder(values: Any) -> bool:
    return any(
        _has_placeholder(value) if isinstance(value, tuple | list) else is_placeholder(value)
        for value in values
    )

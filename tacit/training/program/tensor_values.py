"""What a program gets that asks for the value of a tensor while it is traced.

`.item()` and `.tolist()` give numbers that may be printed and stored. In a condition, or in
arithmetic with tensors, they raise `Untraceable`, as `float()`, `int()` and `bool()` of a tensor
do. The reason names the line of the user's code.
"""

import linecache
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tacit.errors import IncompatibleModel
from tacit.training.program import torch_internals
from tacit.training.program.constant_values import constant_value
from tacit.training.program.one_example import Untraceable
from tacit.training.tree import Batch, LossFn

_VALUES: set[Any] = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__}
_VALUES |= {Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__}
_DRAWS: set[Any] = {torch.rand, torch.randn, torch.randint}
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_ASKED = "it needs the value of a tensor, as in a condition, in float() or by .item()"


class Placeholder(float):
    """The value of a tensor while tracing: not a number, which may be printed or stored."""

    def __new__(cls) -> "Placeholder":
        """Make the placeholder of any number."""
        return super().__new__(cls, math.nan)

    def _asked(self, *_: Any) -> NoReturn:
        raise Untraceable(_ASKED)

    def _computed(self, *others: Any) -> "Placeholder":
        if all(isinstance(other, int | float) for other in others):
            return self
        return NotImplemented

    __hash__ = float.__hash__


for _name in ("bool", "lt", "le", "gt", "ge", "eq", "ne", "int", "round", "trunc", "floor", "ceil"):
    setattr(Placeholder, f"__{_name}__", Placeholder._asked)
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Placeholder, f"__{_name}__", Placeholder._computed)
    setattr(Placeholder, f"__r{_name}__", Placeholder._computed)
for _name in ("neg", "pos", "abs"):
    setattr(Placeholder, f"__{_name}__", Placeholder._computed)


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
        """Return `loss_fn(model, batch)`; raise `Untraceable` if it cannot be traced."""
        try:
            with self:
                return loss_fn(model, batch)
        except Exception as error:
            if isinstance(error, IncompatibleModel) and not isinstance(error, Untraceable):
                raise
            raise Untraceable(self._what(error) + where(error)) from error

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ARG002  # of torch's protocol
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one function of torch."""
        kwargs = kwargs or {}
        if self._is_given and _has_placeholder((*args, *kwargs.values())):
            raise Untraceable(f"{_ASKED}, in {_name_of(func)}")
        if func in _VALUES and not torch_internals.is_fake(args[0]):
            self.read.append((args[0], args[0]._version))
        elif func in _VALUES and (known := constant_value(args[0])) is not None:
            self.read += [(tensor, tensor._version) for tensor in known[1]]
            with torch_internals.untraced():
                return func(known[0], *args[1:], **kwargs)
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
            return _ASKED
        text = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {text}"


def where(error: BaseException) -> str:
    """Return the last line outside of torch and this library that `error` passed, as text."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if not file.startswith((*_LIBRARIES, "<frozen")):
            source = linecache.getline(file, line).strip()
            return f", at {file}:{line}" + (f" (`{source}`)" if source else "")
    return ""


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

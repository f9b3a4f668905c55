"""Errors of the user's program, shown without the values that they quote.

A data set, a `collate_fn`, a loss or torch itself may fail on a private record and say so in words
such as "Target 31337 is out of bounds". `ErrorGuard` replaces such an error by a `ProgramError`. It
names the kind of error, the part of the program and the line of the user's own code, and nothing
that was computed. The original error is dropped with its causes, so that no traceback shows it.

Errors that tacit raises itself quote no private value and stay as they are, without their causes.
An error counts as tacit's own if the frame that raised it belongs to this package and executed a
`raise` statement. Torch functions that tacit calls raise from the same frames, but by a call.
"""

import dis
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from tacit.errors import ProgramError
from tacit.training.program_state import LIBRARIES
from tacit.training.tree import is_out_of_memory

T = TypeVar("T")
P = ParamSpec("P")
_OWN = str(Path(__file__).parents[1])
# The functions of this package that call one part of the user's program each.
_STAGES = {
    "read_records": "the data set",
    "collate_records": "collate_fn",
    "as_views": "augment",
}
_OTHERWISE = "the model or loss_fn"


@dataclass(frozen=True)
class ErrorGuard:
    """Calls functions that run the user's program on private records.

    With `debug`, errors pass unchanged: their text may quote records.
    """

    debug: bool = False

    def __call__(self, call: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> T:
        """Return `call(*args, **options)`; replace an error of the user's program."""
        if self.debug:
            return call(*args, **options)
        try:
            return call(*args, **options)
        except Exception as error:
            shown = _without_causes(error) if _is_own(error) else described(error)
        # Outside the except block: an error raised inside would carry the original as its context.
        raise shown


def described(error: Exception) -> ProgramError:
    """Return an error that states the kind and the place of `error`, but not its text."""
    kind = type(error).__name__
    what = "ran out of memory" if is_out_of_memory(error) else f"raised {kind}"
    return ProgramError(
        f"{_stage(error)} {what}{_place(error)}. The text of the error is withheld because it may "
        "quote records; make_private(..., debug=True) shows it. Nothing was released."
    )


def _is_own(error: BaseException) -> bool:
    """Return whether a `raise` statement of this package raised `error`."""
    if isinstance(error, ProgramError):  # perhaps in a worker process, from where torch brings it
        return True
    *_, last = _entries(error)
    if not _is_inside(last, _OWN):
        return False
    operation = last.tb_frame.f_code.co_code[last.tb_lasti]
    return dis.opname[operation] == "RAISE_VARARGS"


def _without_causes(error: Exception) -> Exception:
    error.__cause__ = error.__context__ = None
    # The frames below this package's public call hold private values.
    return error.with_traceback(None)


def _stage(error: BaseException) -> str:
    names = [e.tb_frame.f_code.co_name for e in _entries(error) if _is_inside(e, _OWN)]
    return next((_STAGES[name] for name in reversed(names) if name in _STAGES), _OTHERWISE)


def _place(error: BaseException) -> str:
    """Return the innermost line of the user's own code, as words; empty if there is none."""
    # The traceback begins where the error was caught, so all frames are below tacit's call.
    entries = [e for e in _entries(error) if not _is_inside(e, _OWN, *LIBRARIES)]
    if not entries:
        return ""
    code = entries[-1].tb_frame.f_code
    return f" in {code.co_name} ({code.co_filename}:{entries[-1].tb_lineno})"


def _entries(error: BaseException) -> Iterator[TracebackType]:
    entry = error.__traceback__
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _is_inside(entry: TracebackType, *folders: str) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(folders)

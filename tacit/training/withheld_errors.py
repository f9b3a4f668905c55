"""Errors of the user's program, shown without the values that they quote.

A data set, a `collate_fn`, a loss or torch itself may fail on a private record and say so in words
such as "Target 31337 is out of bounds". `ErrorGuard` replaces such an error by a `ProgramError`. It
names the kind of error, the part of the program and the line of the user's own code, and nothing
that was computed. The original error is dropped with its causes, so that no traceback shows it.

Errors that tacit raises itself quote no private value and stay as they are, without their causes.
An error counts as tacit's own if the frame that raised it belongs to this package and executed a
`raise` statement. Torch functions that tacit calls raise from the same frames, but by a call. The
user's code may call tacit too, with private values as arguments; an error that came through such
code counts as tacit's own only if it is an `IncompatibleModel` that the training package raised.

Interrupts and exits pass as what they are, without their arguments: `sys.exit("bad label 7")`
becomes an exit with status 1.
"""

import dis
import functools
import linecache
import sys
import sysconfig
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, TracebackType
from typing import ParamSpec, TypeVar

import torch

from tacit.errors import IncompatibleModel, ProgramError
from tacit.training.tree import CALLED_AS, is_out_of_memory, name_of_kind

T = TypeVar("T")
P = ParamSpec("P")
LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
"""Folders of Python's own modules and of installed packages: code that the user did not write."""
_TRAINING, _OWN = (str(folder) for folder in Path(__file__).parents[:2])
# The functions of this package that call one part of the user's program each.
_STAGES = {
    "read_records": "the data set",
    "collate_records": "collate_fn",
    "as_views": "augment",
}
_OTHERWISE = "the model or loss_fn"
_WITHHELD = (
    "The text of the error is withheld because it may quote records; make_private(..., "
    "reports=Reports(errors_in_full=True)) shows it. Nothing was released."
)
_PASSED = (KeyboardInterrupt, GeneratorExit, CancelledError)  # ends of the block, not errors in it


@dataclass(frozen=True)
class ErrorGuard:
    """Runs the user's program on private records: `with guard:` or `guard(call, *arguments)`.

    With `in_full`, errors pass unchanged: their text may quote records. Lines are shown of the
    files that had been read when this was made: others may have a value in their names.
    """

    in_full: bool = False
    files: frozenset[str] = field(default_factory=lambda: _files_read(), repr=False)

    def __call__(self, call: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> T:
        """Return `call(*args, **options)`; replace an error of the user's program."""
        with self:
            return call(*args, **options)

    def __enter__(self) -> None:
        """Watch the block that follows."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        """Replace an error of the block."""
        if self.in_full or error is None:
            return
        shown = _shown(error, self.files)
        shown.__cause__ = None
        del error, frames  # this frame will be part of the new traceback, and keep them alive
        try:
            raise shown.with_traceback(None)  # the frames below hold private values
        finally:
            shown.__context__ = None  # Python has just made it the original error
            del shown


def _shown(error: BaseException, files: frozenset[str]) -> BaseException:
    try:
        return error if _is_own(error) else described(error, files)
    except Exception:  # an error may define what its attributes and its text do
        return ProgramError(f"the program raised an error that cannot be described. {_WITHHELD}")


def described(error: BaseException, files: frozenset[str]) -> BaseException:
    """Return an error that states the kind and the place of `error`, but not its text.

    A place is a function in one of `files`. The error is a `ProgramError`, except that interrupts,
    exits, and memory which runs out keep their own kinds of error.
    """
    if isinstance(error, SystemExit):
        has_failed = error.code is not None and not (type(error.code) is int and error.code == 0)
        return SystemExit(int(has_failed))
    for kind in _PASSED:
        if isinstance(error, kind):
            return kind()
    text = f"{_place(error, files)}. {_WITHHELD}"
    if is_out_of_memory(error):
        kind = MemoryError if isinstance(error, MemoryError) else torch.OutOfMemoryError
        return kind(f"out of memory in {_stage(error)}{text}")
    stage = _stage(error)
    hint = f" {CALLED_AS}" if type(error) is TypeError and stage == _OTHERWISE else ""
    return ProgramError(f"{stage} raised {name_of_kind(type(error))}{text}{hint}")


def _is_own(error: BaseException) -> bool:
    """Return whether a `raise` statement of this package raised `error`."""
    *before, last = _entries(error)
    if isinstance(error, ProgramError) and last.tb_frame.f_code.co_name == "reraise":
        return _is_inside(last, *LIBRARIES)  # torch brings it from a worker process
    is_called_by_user = any(not _is_inside(e, _OWN, *LIBRARIES) for e in before)
    if is_called_by_user and not (type(error) is IncompatibleModel and _is_inside(last, _TRAINING)):
        return False
    if not _is_inside(last, _OWN):
        return False
    operation = last.tb_frame.f_code.co_code[last.tb_lasti]
    return dis.opname[operation] == "RAISE_VARARGS"


def _stage(error: BaseException) -> str:
    names = [e.tb_frame.f_code.co_name for e in _entries(error) if _is_inside(e, _OWN)]
    return next((_STAGES[name] for name in reversed(names) if name in _STAGES), _OTHERWISE)


def _place(error: BaseException, files: frozenset[str]) -> str:
    """Return the innermost line of the user's own code, as words; empty if there is none."""
    # The traceback begins where the error was caught, so all frames are below tacit's call.
    for entry in reversed(list(_entries(error))):
        code = entry.tb_frame.f_code
        if code.co_filename not in files or _is_inside(entry, "<", _OWN, *LIBRARIES):
            continue
        # Code that was made at run time may have a value in its name or the number of its line.
        if (code.co_name, code.co_firstlineno) in _functions_of(code.co_filename):
            return f" in {code.co_name} ({code.co_filename}:{entry.tb_lineno})"
    return ""


def _files_read() -> frozenset[str]:
    """Return the names of all files whose code was read so far: modules, cells of a notebook."""
    modules = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return frozenset(name for name in (*modules, *linecache.cache) if isinstance(name, str))


@functools.lru_cache
def _functions_of(file: str) -> frozenset[tuple[str, int]]:
    """Return the functions that are written in a file, by name and first line."""
    try:
        pending = [compile("".join(linecache.getlines(file)), file, "exec")]
    except (SyntaxError, ValueError):  # commands of a notebook, or no code at all
        return frozenset()
    found = set()
    while pending:
        code = pending.pop()
        found.add((code.co_name, code.co_firstlineno))
        pending.extend(part for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(found)


def _entries(error: BaseException) -> Iterator[TracebackType]:
    entry = error.__traceback__
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _is_inside(entry: TracebackType, *folders: str) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(folders)

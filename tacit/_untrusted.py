"""Reading files that a stranger may have written: limits on size, depth and time; safe printing.

Certificates, recipes, facts, ledgers and headers of model files are data. Nothing in them is
imported or called, and a hostile one ends in a `ValueError` of one sentence.
"""

import json
import re
import signal
import threading
import time
import unicodedata
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST_BYTES = 512 * 1024
"""Largest certificate, recipe or facts file that is read. Those that tacit writes are far below."""
MOST_DEPTH = 100
"""Deepest nesting of objects and lists that is read."""

_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def read_text(path: Path, *, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a file; raise `ValueError` if it is not UTF-8 or has too many bytes.

    A pipe or a device is not read: it might have no end.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is not a file with text.")
    with path.open("rb") as stream:
        raw = stream.read(most_bytes + 1)
    if len(raw) > most_bytes:
        raise ValueError(f"{path.name} is larger than {most_bytes:,} bytes, so it was not read.")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path.name} is not text in UTF-8.") from None


def read_json(path: Path, *, most_bytes: int = MOST_BYTES) -> Any:  # Any: JSON values
    """Return the content of a JSON file, within the limits of `read_text` and `parse_json`."""
    return parse_json(read_text(path, most_bytes=most_bytes), name=path.name)


def parse_json(text: str, *, name: str) -> Any:  # Any: JSON values
    """Return the JSON values in `text`; `name` says in errors what the text is.

    Raises `ValueError` for anything else than strict JSON: NaN and infinity, a name that occurs
    twice in one object (readers differ in which of the two they use), and nesting deeper than
    `MOST_DEPTH`.
    """
    _require_shallow(text, name)
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as wrong:
        raise ValueError(f"{name} is not strict JSON: {printable(str(wrong))[:200]}") from None


def printable(text: str) -> str:
    r"""Return `text` with every character that could steer a terminal written as an escape.

    These are control characters, format characters such as those that reverse the direction of
    writing, and separators of lines. A line break becomes a space.

    >>> printable("\x1b[2Jall is well")
    '\\x1b[2Jall is well'
    """
    return "".join(_shown(character) for character in text)


@contextmanager
def time_limit(seconds: float, *, what: str) -> Generator[None]:
    """Raise `TimeoutError` in the block after `seconds`; `what` names the work in the message.

    The limit works in the main thread of systems that have interval timers. Elsewhere the block
    runs without a limit.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"{what} took longer than {seconds:g} s and was stopped.")

    usual = signal.signal(signal.SIGALRM, stop)
    # Every 0.1 s from then on: a callback of the garbage collector may swallow the first one.
    before = signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    started = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
        if before[0]:  # someone else's timer goes on
            left = max(before[0] - (time.monotonic() - started), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, before[1])


def _require_shallow(text: str, name: str) -> None:
    depth = 0
    for token in _TOKENS.finditer(text):
        symbol = text[token.start()]
        if symbol in "[{":
            depth += 1
            if depth > MOST_DEPTH:
                raise ValueError(f"{name} is nested deeper than {MOST_DEPTH} levels.")
        elif symbol in "]}":
            depth -= 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:  # Any: JSON values
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:50]} appears twice")
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _shown(character: str) -> str:
    if character in "\n\r\t":
        return " "
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return character.encode("unicode_escape", "backslashreplace").decode("ascii")
    return character

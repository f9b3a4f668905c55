"""A word about what takes long, for work whose time is not known in advance."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_AFTER = 2.0  # seconds; what takes less is not mentioned


@contextmanager
def told_if_slow(doing: str) -> Iterator[None]:
    """Print `doing` to standard error if the block takes more than two seconds.

    >>> with told_if_slow("tracing the program"):
    ...     pass
    """
    timer = threading.Timer(_AFTER, print, [f"tacit: {doing} ..."], {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

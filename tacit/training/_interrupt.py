"""Ctrl-C waits for the end of a release, so that state and parameters always agree."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """An interrupt that arrives inside is delivered at the end of the block."""
    usual = signal.getsignal(signal.SIGINT)
    # Only the main thread receives signals; a handler not set from Python cannot be put back.
    if threading.current_thread() is not threading.main_thread() or usual is None:
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if held and callable(usual):
        usual(*held[0])

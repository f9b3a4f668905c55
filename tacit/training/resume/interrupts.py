"""One step at a time, and none that an interrupt leaves half done."""

import signal
import threading
from types import FrameType

try:
    import _signal as _signals  # pyright: ignore[reportMissingImports]  # not of every Python
except ImportError:  # another Python
    _signals = signal


class OneStep:
    """A block that is entered once at a time: another thread, or the same one again, is refused.

    A lot is used once. Two steps at the same time would add the noise of two steps to one lot.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "a step of this run is being taken, by another thread or by a call inside loss_fn. "
                "Take one step at a time."
            )

    def __exit__(self, *_error: object) -> None:
        self._lock.release()


class Uninterrupted:
    """A block to whose end Ctrl-C is delayed, so that step counter and parameters stay consistent.

    The module behind `signal` is used, since every step enters such a block: `signal` itself turns
    numbers into enums, which takes as long as a small launch on a GPU.
    """

    def __enter__(self) -> None:
        self._held: tuple[int, FrameType | None] | None = None
        # Only the main thread receives signals; a handler not set from Python cannot be put back.
        is_main = threading.current_thread() is threading.main_thread()
        self._usual = _signals.getsignal(signal.SIGINT) if is_main else None
        if self._usual is not None:
            _signals.signal(signal.SIGINT, self._hold)

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _frames: object
    ) -> None:
        usual = self._usual
        if usual is None:
            return
        _signals.signal(signal.SIGINT, usual)
        if error is None and self._held is not None and callable(usual):
            usual(*self._held)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held = self._held or (number, frame)

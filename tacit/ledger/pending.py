"""Work that is paid once, although it may be killed between payment and result.

A command that pays and then prints its result has no run folder to resume from. While it works, a
file beside the ledger (mode 0600) holds the key of its noise and the random name under which it
pays. If the command is killed and started again on the same data with the same settings, it finds
that file, repeats the same noise, and its payment is already there. The file is removed when the
result is out. Whoever reads the file before that can subtract the noise. While one process does the
work, the same work is refused to others.
"""

import contextlib
import hashlib
import hmac
import os
from collections.abc import Generator
from pathlib import Path

from tacit._file_lock import lock
from tacit.ledger.ledger import Ledger

_KEY, _NAME = 32, 16  # bytes of the key and of the name; the rest of a file is a fingerprint


@contextlib.contextmanager
def paid_once(ledger: Ledger, *parts: bytes) -> Generator[int]:
    """Yield the seed of the noise for work that pays from `ledger` at most once.

    `parts` are everything that the released values depend on: the data and all settings. The work
    must be a function of them and of the seed. Payments are made inside the block, and its result
    is out when the block ends. A block that raises or is killed may be tried again.

    >>> from tacit.events import Laplace
    >>> ledger = Ledger()
    >>> with paid_once(ledger, b"data", b"settings") as seed:
    ...     entry = ledger.spend(Laplace(1.0))
    """
    fingerprint = _fingerprint(parts)
    content = os.urandom(_KEY + _NAME)
    if ledger.path is None:
        with ledger.attempt(content[_KEY:].hex()):
            yield int.from_bytes(_mac(content[:_KEY], b"noise" + fingerprint))
        return
    folder = _folder(ledger.path)
    file, content = _find(folder, fingerprint) or _begin(folder, fingerprint, content)
    key, name = content[:_KEY], content[_KEY : _KEY + _NAME].hex()
    with _locked(file):
        with ledger.attempt(name):
            yield int.from_bytes(_mac(key, b"noise" + fingerprint))
        with contextlib.suppress(PermissionError):  # Windows: not while it is locked
            file.unlink(missing_ok=True)
    file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other work may be pending
        folder.rmdir()


def is_pending(ledger: Ledger, *parts: bytes) -> bool:
    """Return whether work with these parts was begun with `paid_once`, and has not ended."""
    return ledger.path is not None and bool(_find(_folder(ledger.path), _fingerprint(parts)))


def any_pending(ledger_file: Path) -> bool:
    """Return whether any work that pays from this ledger file was begun and has not ended."""
    return _folder(ledger_file).is_dir()


def _folder(ledger_file: Path) -> Path:
    return ledger_file.with_name(f".{ledger_file.name}.pending")


def _fingerprint(parts: tuple[bytes, ...]) -> bytes:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


@contextlib.contextmanager
def _locked(file: Path) -> Generator[None]:
    """Hold `file`, so that the same work is not done twice at the same time for one payment.

    The operating system releases the lock when the process ends, also if it is killed.
    """
    handle, is_held = None, False
    try:
        with contextlib.suppress(OSError):
            handle = os.open(file, os.O_RDWR)
            lock(handle)
            # Otherwise the work of another process ended just now, and its file was removed.
            is_held = os.path.samestat(os.fstat(handle), os.stat(file))
        if not is_held:
            raise BlockingIOError(
                "the same work on the same data is under way in another process. Wait for its end "
                "and start again: that is then new work, which pays."
            )
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _find(folder: Path, fingerprint: bytes) -> tuple[Path, bytes] | None:
    """Return the file and the content of earlier work with this fingerprint."""
    for file in sorted(folder.glob("*.key")) if folder.is_dir() else ():
        with contextlib.suppress(OSError):  # other work may just have ended
            content = file.read_bytes()
            key, mark = content[:_KEY], content[_KEY + _NAME :]
            if hmac.compare_digest(mark, _mac(key, b"mark" + fingerprint)):
                return file, content
    return None


def _begin(folder: Path, fingerprint: bytes, content: bytes) -> tuple[Path, bytes]:
    """Write the key, the name and a salted fingerprint durably, before anything is paid."""
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / f"{content[_KEY:].hex()}.key"
    # The fingerprint is salted with the key, so that it does not confirm guesses about the data.
    content += _mac(content[:_KEY], b"mark" + fingerprint)
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(handle, content)
        os.fsync(handle)
    finally:
        os.close(handle)
    with contextlib.suppress(OSError):  # some systems cannot open a folder
        place = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(place)
        finally:
            os.close(place)
    return file, content


def _mac(key: bytes, message: bytes) -> bytes:
    return hmac.new(key, message, hashlib.sha256).digest()

"""What a search keeps until it ends: outcomes of runs and computed features, in a private folder.

The folder is beside the ledger, readable by its owner only. It lets a killed search continue
without repeating its runs, and is deleted when the search ends. Files hold pickles, and opening a
pickle can run code. So they carry a code made with the seed of the search and with a secret that
this user's account keeps elsewhere, and are read only if the code is right: files that came with a
stranger's ledger are not.
"""

import contextlib
import hashlib
import hmac
import os
import pickle
import secrets
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Self

from tacit._whole_file import write_whole
from tacit.tuning.private_run import Outcome

_CODE = 32  # bytes
_SECRET = 32  # bytes


class Unfinished:
    """What the runs of one search keep; without a ledger file, it goes with the block.

    `cache` is the folder for what runs compute. It is made on use.
    """

    def __init__(self, ledger_file: Path | None, seed: int) -> None:
        secret = None if ledger_file is None else _secret_of_account()
        key = hashlib.sha256(b"outcomes" + (secret or b"") + seed.to_bytes(64)).digest()
        self._key = key
        self._folder = None
        if ledger_file is not None and secret is not None:
            name = hashlib.sha256(b"folder" + key).hexdigest()[:16]
            self._folder = ledger_file.with_name(f".{ledger_file.name}.search-{name}")
        temporary = Path(tempfile.gettempdir()) / f"tacit-search-{secrets.token_hex(16)}"
        self.cache = (self._folder or temporary) / "cache"

    def __enter__(self) -> Self:
        self.cache.parent.mkdir(mode=0o700, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is None:
            self.delete()

    def read(self, run: int) -> Outcome | None:
        """Return the outcome of a finished run, or None."""
        if self._folder is None or not (path := self._folder / f"{run}.private").is_file():
            return None
        content = path.read_bytes()
        if not hmac.compare_digest(content[:_CODE], self._code(run, content[_CODE:])):
            return None  # half written, or not ours: the run is repeated
        return Outcome(*pickle.loads(content[_CODE:]))  # its code is right: we wrote it

    def write(self, run: int, outcome: Outcome) -> None:
        """Keep the outcome of a run until the search ends."""
        if self._folder is None:
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        content = pickle.dumps(tuple(outcome))
        path = self._folder / f"{run}.private"
        write_whole(path, self._code(run, content) + content, mode=0o600)

    def delete(self) -> None:
        """Remove everything."""
        place = self.cache.parent
        shutil.rmtree(place, ignore_errors=True)
        if place.exists():
            warnings.warn(
                f"{place} holds private outcomes of a search and could not be deleted. Delete it.",
                stacklevel=3,
            )

    def _code(self, run: int, content: bytes) -> bytes:
        return hmac.new(self._key, run.to_bytes(8) + content, hashlib.sha256).digest()


def _secret_of_account() -> bytes | None:
    """Return a secret of this user's account, made at its first use; None if there is no home."""
    try:
        home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        path = home / "tacit" / "outcomes.key"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as stream:
                stream.write(os.urandom(_SECRET))
        found = path.read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: the account has no home
        return None
    return found if len(found) == _SECRET else None

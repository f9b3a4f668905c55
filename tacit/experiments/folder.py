"""The run folder: the files that one run leaves behind.

    runs/mnist-epsilon-3/
    ├── recipe.toml         the recipe with every default written out, to repeat the run
    ├── metrics.jsonl       one JSON object per evaluation of the private model (see `Metric`)
    ├── baseline.jsonl      the same for the non-private twin; absent if there is no twin
    ├── model.safetensors   the released weights, with the model's recipe as header
    ├── run.ledger          the payments (`tacit ledger show run.ledger`)
    ├── facts.json          `Facts`; written last, so its presence marks a finished run
    ├── audit.json          what `tacit audit` found, if the run was audited
    ├── data.json           mode 0600: the folder of the data, so that a resumed run finds them
    ├── .lock               held by the process that works in the folder
    └── secret/             mode 0700: checkpoint, paid features; removed at the end, apart from the
                            states, with the key, that `run.stretches` keeps for a replay

A PATE run has other files in place of the metrics and the model:

    ├── answers.jsonl       released answers; an interrupted run resumes from this file
    ├── student.npz         the released student (`SpreadStudent.from_arrays`)
    └── by_answers.jsonl    epsilon and accuracy after growing numbers of answers

Except for `secret/`, the folder holds only released and public values. Metrics are measured on the
test split, which is assumed public, with weights that were paid for. Every file is replaced as a
whole, so a reader finds either the old content or the new one.
"""

import contextlib
import csv
import io
import json
import os
import shutil
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path

from tacit._file_lock import lock
from tacit._untrusted import parse_json, read_json, read_text
from tacit._whole_file import PARTIAL, write_whole
from tacit.errors import LedgerError
from tacit.events import Relation
from tacit.experiments.facts import (
    FACTS,
    LEDGER,
    RECIPE,
    REPLAY,
    SECRET,
    Facts,
    Json,
    Metric,
    with_files,
)
from tacit.experiments.recipe import Recipe
from tacit.ledger import Budget, Ledger

_LOCK, _DATA = ".lock", "data.json"
_MOST_LINES = 64 * 2**20  # bytes of a file of metrics


class RunFolder:
    """Paths and atomic files of one run.

    >>> import tempfile
    >>> folder = RunFolder(tempfile.mkdtemp())
    >>> folder.write_lines("metrics.jsonl", [{"step": 10, "accuracy": 0.9}])
    >>> folder.read_lines("metrics.jsonl")
    [{'step': 10, 'accuracy': 0.9}]
    >>> folder.is_finished
    False
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._start = time.perf_counter()

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended: whether facts.json, its last file, exists."""
        return (self / FACTS).is_file()

    @property
    def is_empty(self) -> bool:
        """Whether the folder is missing or holds nothing but half-written files."""
        ours = (_LOCK, _DATA)
        return not self.path.exists() or all(
            p.suffix == PARTIAL or p.name in ours for p in self.path.iterdir()
        )

    @contextlib.contextmanager
    def locked(self, *, patience: float = 0.0) -> Generator[None]:
        """Hold the folder, so that no other process or thread works in it during the block.

        The operating system releases the lock when the process ends, also if it is killed. Raises
        `BlockingIOError` if someone else still holds the folder after `patience` seconds.
        """
        new = [p for p in (self.path, *self.path.parents) if not p.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _wait_for_lock(handle, time.monotonic() + patience)
            if not os.path.samestat(os.fstat(handle), os.stat(self / _LOCK)):
                raise BlockingIOError  # its last holder removed it together with an unused folder
        except OSError:
            os.close(handle)
            raise BlockingIOError(
                f"another process works in {self.path}. Wait for it to end, or choose another "
                "folder with --out."
            ) from None
        try:
            yield
        finally:
            self._remove_if_unused(new)
            os.close(handle)

    @contextlib.contextmanager
    def taken(
        self, recipe: Recipe, *, verb: str, root: str | Path | None
    ) -> Generator[str | Path | None]:
        """Hold the folder for a run of `recipe`, and yield the folder of its data.

        Raises if the folder holds a run of another recipe, or files of no run. `verb` is the
        command that resumes the run. The block returns the facts if the run is finished; otherwise
        it reads the data and then enters `paying`, which begins the run.
        """
        with self.locked():
            self.refuse_other_recipe(recipe, resume=f"tacit {verb} {self.path}")
            if self.is_finished:
                self.close()  # in case the run was killed just after it wrote its facts
            else:
                self.refuse_foreign_files()
            yield self.data_root(root)

    def paying(self, recipe: Recipe, root: str | Path | None, ledger: str | Path | None) -> Ledger:
        """Write the recipe and where the data are, and return the ledger that pays."""
        self.write(RECIPE, recipe.to_toml())
        self.remember_data(root)
        return self.open_ledger(recipe, None, ledger)

    @property
    def seconds(self) -> float:
        """Seconds since this object was made: how long the run takes in this process."""
        return round(time.perf_counter() - self._start, 3)

    def _remove_if_unused(self, new: list[Path]) -> None:
        """Remove the folders that `locked` made, if nothing but the lock was written there."""
        if not new or [p.name for p in self.path.iterdir()] != [_LOCK]:
            return
        (self / _LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # someone else may use a folder by now
            for path in new:
                path.rmdir()

    def data_root(self, given: str | Path | None) -> str | Path | None:
        """Return the folder of the data: `given`, or else the one that this run used before."""
        if given is None and (self / _DATA).is_file():
            found = read_json(self / _DATA)
            root = found.get("root") if isinstance(found, dict) else None
            return root if isinstance(root, str) else None
        return given

    def remember_data(self, root: str | Path | None) -> None:
        """Store where the data are: `root`, TACIT_DATA or the current folder, as a full path."""
        place = Path(root or os.environ.get("TACIT_DATA") or ".").absolute()
        write_whole(self / _DATA, json.dumps({"root": str(place)}) + "\n", mode=0o600)

    def facts(self) -> Facts:
        """Return the facts of the run; raise `FileNotFoundError` if the run has not ended."""
        if not self.is_finished:
            raise FileNotFoundError(
                f"{self.path} holds no finished run ({FACTS} is missing). Start or resume it with "
                "the verb that began it, such as tacit train."
            )
        return Facts.from_dict(read_json(self / FACTS))

    def refuse_other_recipe(self, recipe: Recipe, *, resume: str) -> None:
        """Raise if the folder holds a recipe that differs from `recipe`.

        `resume` is the command that resumes the run in the folder. The error message suggests it.
        """
        if not (self / RECIPE).is_file():
            return
        trusted = [recipe.model.module.partition(":")[0]]  # the same code as the given recipe
        stored = Recipe.read(self / RECIPE, trust_code=trusted)
        if stored.data.schema != recipe.data.schema:
            raise ValueError(
                f"the schema has changed since the run in {self.path} was begun: choose another "
                "--out."
            )
        if stored != recipe:
            raise ValueError(
                f"{self.path} holds a run of another recipe. Choose another folder with --out, or "
                f"go on as it was planned: {resume}"
            )

    def refuse_foreign_files(self) -> None:
        """Raise if the folder holds files but no recipe of a run."""
        if not (self / RECIPE).is_file() and not self.is_empty:
            raise ValueError(
                f"{self.path} is not empty and holds no run: choose a new or empty folder with "
                "--out."
            )

    def open_ledger(
        self, recipe: Recipe, budget: Budget | None, ledger: str | Path | None = None
    ) -> Ledger:
        """Open the ledger file `ledger`, or the recipe's, or else run.ledger in this folder.

        `budget` is that of run.ledger. A ledger elsewhere is that of the data set: it must exist,
        with its own budget and the recipe's relation. A new one would have no budget, and a wrong
        path would go unnoticed.
        """
        privacy, relation = recipe.privacy, Relation(recipe.privacy.relation)
        if given := ledger or privacy.ledger:
            return open_for_run(given, relation)
        return Ledger(self / LEDGER, budget=budget, relation=relation, unit=privacy.unit)

    def reopen_ledger(self, facts: Facts, *, read_only: bool = False) -> Ledger:
        """Open the existing ledger that paid for the finished run."""
        path = self / facts.ledger_file  # a full path replaces the folder
        if not path.is_file():
            raise LedgerError(f"there is no ledger at {path}.")
        return Ledger(path, read_only=read_only)

    def find_ledger(self, facts: Facts, given: str | Path | None = None) -> Path | None:
        """Return the ledger file to check the finished run with, or None if there is none.

        It is `given`, or a file of its name in this folder, or the file that paid. Read it only: a
        copy of a ledger must never pay.
        """
        if given is not None:
            return Path(given)
        name = facts.ledger_file.replace("\\", "/").rpartition("/")[2]  # of another system too
        places = (self / name, self / facts.ledger_file, self / LEDGER)
        return next((place for place in places if name and place.is_file()), None)

    def write(self, name: str, content: str | bytes) -> Path:
        """Write the file `name` to disk; after a crash it has either its old or its new content."""
        return write_whole(self / name, content)

    def write_lines(self, name: str, rows: Sequence[Mapping[str, Json]]) -> None:
        """Write a file with one JSON object per line."""
        self.write(name, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))

    def write_table(
        self, name: str, header: Sequence[str], rows: Iterable[Sequence[object]]
    ) -> None:
        """Write a CSV file with a header line and one line per row."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([header, *rows])
        self.write(name, text.getvalue())

    def read_lines(self, name: str) -> list[Metric]:
        """Return the rows of a file of JSON lines; an empty list if the file is missing."""
        path = self / name
        if not path.is_file():
            return []
        lines = read_text(path, most_bytes=_MOST_LINES).splitlines()
        return [parse_json(line, name=name) for line in lines]

    def finish(self, facts: Facts, ledger: Ledger) -> Facts:
        """Add the hashes of the folder's files to `facts`, write facts.json, return the facts."""
        facts = with_files(facts, self.path, ledger)
        self.write(FACTS, facts.to_json())
        self.close()
        return facts

    def close(self) -> None:
        """Remove what is in `secret/`, and files left half-written.

        States that the recipe keeps for a replay (`run.stretches`) stay.
        """
        kept = self / SECRET / REPLAY
        if kept.is_dir():
            for path in kept.parent.iterdir():
                if path != kept:
                    path.unlink(missing_ok=True)
        else:
            shutil.rmtree(self / SECRET, ignore_errors=True)
        for part in self.path.glob(f".*{PARTIAL}"):
            part.unlink(missing_ok=True)


def open_for_run(path: str | Path, relation: Relation | None = None) -> Ledger:
    """Open the ledger file that pays for a run; it must exist, and have `relation` if given."""
    if not Path(path).is_file():
        raise LedgerError(
            f"there is no ledger at {path}. Create it with: "
            f"tacit ledger create {path} --epsilon NUMBER --delta NUMBER"
        )
    return Ledger(path, relation=relation)


def _wait_for_lock(handle: int, deadline: float) -> None:
    """Lock the open file; raise `OSError` if someone else has locked it until the deadline."""
    while True:
        try:
            return lock(handle)
        except OSError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.05)

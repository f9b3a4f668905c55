"""The run folder: what one training run leaves behind, and nothing half-written.

    runs/mnist-epsilon-3/
    ├── recipe.toml         the recipe with every default written out, to repeat the run
    ├── metrics.jsonl       one JSON object per evaluation of the private model (see `Metric`)
    ├── baseline.jsonl      the same for the non-private twin; absent if there was none
    ├── model.safetensors   what is released: the weights, and the model's recipe as header
    ├── run.ledger          the payments (`tacit ledger show run.ledger`)
    ├── facts.json          `Facts`: what a certificate needs; written last: the end mark
    └── secret/             mode 0700: checkpoint with the noise's key; removed at the end

Released and public values only, `secret/` apart: whoever has the key can subtract the noise.
Metrics are measured on the test split, which is assumed to be public, with weights that were paid
for. Every file is replaced whole, so a reader finds the old one or the new one.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tacit.events import Event, Relation, from_dict

FACTS_VERSION = 1

RECIPE = "recipe.toml"
METRICS = "metrics.jsonl"
BASELINE = "baseline.jsonl"
MODEL = "model.safetensors"
LEDGER = "run.ledger"
FACTS = "facts.json"
SECRET = "secret"
PART = ".part"  # ending of a file that is being written

Json = Any  # Any: JSON values have no narrower common type
Metric = dict[str, float]
"""One line of metrics.jsonl, numbers alone: `step`, `epoch`, `epsilon` (what the run would cost had
it been planned to end here; absent in baseline.jsonl), and on the test split `loss`, `accuracy`
and, for two classes, `auc`."""


@dataclass(frozen=True, kw_only=True)
class Touch:
    """One way in which the run looked at data, and what the claim does about it.

    `cost` is one of "paid" (covered: `event` is part of the claim), "free" (covered: what a record
    becomes depends on that record alone), "public" (looked only at what is assumed public), and
    "not covered" (looked at private records without paying: the claim does not hold for it).
    """

    what: str
    """preprocessing, training, model selection, early stopping, evaluation, baseline, size."""
    how: str
    cost: str
    event: dict[str, Json] | None = None


@dataclass(frozen=True, kw_only=True)
class SeedValue:
    """The metric of one run; `seed` is None for operating-system entropy."""

    seed: int | None
    value: float


@dataclass(frozen=True, kw_only=True)
class Utility:
    """How good the released model is on the public test split.

    `private` starts with the run itself; a sweep adds the runs that differ in the seed alone.
    Those are separate runs with separate bills: `epsilon` covers one of them.
    """

    metric: str
    private: tuple[SeedValue, ...]
    non_private: tuple[SeedValue, ...] = ()
    majority: float | None = None
    """The metric of always answering the commonest class of the public test split."""
    others: dict[str, float] = field(default_factory=dict)
    """Further metrics of the run itself, e.g. loss and auc."""
    n_test: int = 0

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return sum(one.value for one in self.private) / len(self.private)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds (n - 1); None for one seed."""
        n = len(self.private)
        if n < 2:
            return None
        return (sum((one.value - self.mean) ** 2 for one in self.private) / (n - 1)) ** 0.5


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a run did, in full; `facts.json` holds it as plain JSON values, field by field."""

    # The claim
    event: dict[str, Json]
    """Everything done to the private records, as one event (`tacit.events.from_dict`)."""
    relation: str
    """A value of `tacit.events.Relation`."""
    unit: str
    """What one record stands for: the unit of privacy."""
    delta: float
    epsilon: float
    """Upper end of `tacit.bracket(event, delta, relation)`."""
    epsilon_target: float | None
    """What the noise was calibrated to; None if the noise was given."""
    # What it rests on
    data: str
    """Name of the data set."""
    n_records: int
    """Number of training records, assumed public."""
    assumed_public: tuple[str, ...]
    sampling_assumed: str
    """What the event assumes, in words: e.g. 'Poisson, rate 0.1365'."""
    sampling_used: str
    """What the loader did."""
    touches: tuple[Touch, ...]
    released: tuple[str, ...]
    """Everything that leaves the run."""
    seed: int | str
    """The seed of noise and sampling, or 'OS entropy'. With a seed the noise can be recomputed."""
    trust: str = "central: the run's operator sees the records; the guarantee is towards all others"
    # How it was done
    method: str = "DP-SGD"
    model: str = ""
    """The architecture in words."""
    hyperparameters: dict[str, Json] = field(default_factory=dict)
    """batch_size, epochs, steps, clip_norm, noise_multiplier, learning_rate, …"""
    steps: int = 0
    resumed: int = 0
    """How often the run was interrupted and went on; repeated steps repeat their noise."""
    # What came of it
    utility: Utility
    model_file: str = MODEL
    model_sha256: str = ""
    recipe_file: str = RECIPE
    recipe_sha256: str = ""
    metrics_file: str = METRICS
    baseline_file: str | None = None
    ledger_file: str = LEDGER
    ledger_head: str = ""
    """Hash of the ledger's last row (`Ledger.verify().head`)."""
    seconds: float = 0.0
    """Wall-clock time of the private training, all sessions together."""
    versions: dict[str, str] = field(default_factory=dict)
    """tacit, python, torch, numpy, scipy."""
    created: str = ""
    """UTC time, ISO 8601."""
    version: int = FACTS_VERSION

    @property
    def claim(self) -> Event:
        """The event as a value that accountants take."""
        return from_dict(self.event)

    def to_dict(self) -> dict[str, Json]:
        """Plain JSON values; `from_dict` gives equal facts back."""
        return json.loads(json.dumps(asdict(self), allow_nan=False))

    @classmethod
    def from_dict(cls, data: Mapping[str, Json]) -> "Facts":
        """The facts in the form of `to_dict`; `ValueError` if they cannot be read."""
        if data.get("version") != FACTS_VERSION:
            raise ValueError(
                f"facts must be of version {FACTS_VERSION}, got {data.get('version')!r}."
            )
        try:
            utility = dict(data["utility"])
            for side in ("private", "non_private"):
                utility[side] = tuple(SeedValue(**one) for one in utility[side])
            rest = {
                **data,
                "utility": Utility(**utility),
                "touches": tuple(Touch(**touch) for touch in data["touches"]),
                "released": tuple(data["released"]),
                "assumed_public": tuple(data["assumed_public"]),
            }
            facts = cls(**rest)
            Relation(facts.relation)
        except (KeyError, TypeError, ValueError) as wrong:
            raise ValueError(f"the facts cannot be read: {wrong}") from None
        return facts


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

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended: its facts are written last."""
        return (self / FACTS).is_file()

    def facts(self) -> Facts:
        """What the run did; `FileNotFoundError` if it has not ended."""
        if not self.is_finished:
            raise FileNotFoundError(
                f"{self.path} holds no finished run ({FACTS} is missing). "
                "Start or resume it with: tacit train"
            )
        return Facts.from_dict(json.loads((self / FACTS).read_text(encoding="utf-8")))

    def write(self, name: str, content: str | bytes) -> Path:
        """The file `name` with that content: whole or not at all, and durable."""
        return write_whole(self / name, content)

    def write_lines(self, name: str, rows: Sequence[Mapping[str, Json]]) -> None:
        """JSON lines."""
        self.write(name, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))

    def close(self) -> None:
        """Remove the key and whatever a killed process left half-written."""
        shutil.rmtree(self / SECRET, ignore_errors=True)
        for part in self.path.glob(f".*{PART}"):
            part.unlink(missing_ok=True)

    def read_lines(self, name: str) -> list[Metric]:
        """The rows of a file of JSON lines; none if it is not there."""
        path = self / name
        if not path.is_file():
            return []
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o644) -> Path:
    """`content` at `path` by writing beside it, syncing, and renaming."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = content.encode("utf-8") if isinstance(content, str) else content
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(raw)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(part, mode)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    return path

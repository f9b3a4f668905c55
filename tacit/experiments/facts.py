"""Facts of a run: what it did to the records, what that costs, and how good the result is.

`facts.json` in the run folder holds them as plain JSON values. Certificates and reports are derived
from facts alone.
"""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import tacit
from tacit import accounting
from tacit.datasets import Dataset
from tacit.events import Event, Relation, from_dict
from tacit.experiments.recipe import Recipe
from tacit.ledger import Ledger

FACTS_VERSION = 1

# Names of the files in a run folder; `tacit.experiments.folder` describes them.
RECIPE = "recipe.toml"
METRICS = "metrics.jsonl"
BASELINE = "baseline.jsonl"
MODEL = "model.safetensors"
LEDGER = "run.ledger"
FACTS = "facts.json"
AUDIT = "audit.json"
SECRET = "secret"
ANSWERS = "answers.jsonl"
STUDENT = "student.npz"
CURVE = "by_answers.jsonl"

Json = Any  # Any: JSON values have no narrower common type
Metric = dict[str, float]
"""One line of metrics.jsonl, numbers only: `step`, `epoch`, `epsilon` (the cost of a run planned to
end at this step; absent in baseline.jsonl), and on the test split `loss`, `accuracy` and, for two
classes, `auc`."""


@dataclass(frozen=True, kw_only=True)
class Touch:
    """One way in which the run used data, and whether the privacy claim of the run covers this use.

    `cost` is one of "paid" (covered: `event` is part of the claim), "free" (covered: each record is
    transformed by itself), "public" (used only what is assumed public), and "not covered" (used
    private records without paying, so the claim does not hold for this use).
    """

    what: str
    """preprocessing, training, model selection, early stopping, evaluation, baseline, size."""
    how: str
    cost: str
    event: dict[str, Json] | None = None


@dataclass(frozen=True, kw_only=True)
class SeedValue:
    """The metric that one run reached; `seed` is None if its randomness came from the system."""

    seed: int | None
    value: float


@dataclass(frozen=True, kw_only=True)
class Utility:
    """Quality of the released model on the public test split.

    The first entry of `private` is the run that these facts describe. A sweep adds the runs that
    differ from it only in the seed. Each of these runs is a separate release with a separate cost:
    `epsilon` covers one of them.
    """

    metric: str
    private: tuple[SeedValue, ...]
    non_private: tuple[SeedValue, ...] = ()
    majority: float | None = None
    """Metric of a model that always answers the most frequent class of the public test split."""
    others: dict[str, float] = field(default_factory=dict)
    """Further metrics of the run itself, such as loss and auc."""
    n_test: int = 0

    @property
    def mean(self) -> float:
        """Mean of the metric over all seeds."""
        return sum(one.value for one in self.private) / len(self.private)

    @property
    def spread(self) -> float | None:
        """Standard deviation of the metric over seeds (divisor n - 1); None for a single seed."""
        n = len(self.private)
        if n < 2:
            return None
        return (sum((one.value - self.mean) ** 2 for one in self.private) / (n - 1)) ** 0.5


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything that a reader needs to judge and recompute the guarantee of a run."""

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
    """The epsilon to which the noise was calibrated; None if the noise was given."""
    # Assumptions behind the claim
    data: str
    """Name of the data set."""
    n_records: int
    """Number of training records, assumed public."""
    assumed_public: tuple[str, ...]
    sampling_assumed: str
    """The sampling that the event assumes, in words, such as 'Poisson, rate 0.1365'."""
    sampling_used: str
    """The sampling that the run performed, in words."""
    touches: tuple[Touch, ...]
    released: tuple[str, ...]
    """Everything that leaves the run."""
    seed: int | str
    """The seed of noise and sampling, or 'OS entropy'. With a seed the noise can be recomputed."""
    generator: str = ""
    """The random generator of the noise, called cryptographic or statistical."""
    data_fingerprint: str = ""
    """A hash of all training records under a secret that is kept in the run folder."""
    trust: str = "central: the run's operator sees the records; the guarantee is towards all others"
    # How the run was done
    method: str = "DP-SGD"
    model: str = ""
    """The architecture in words."""
    hyperparameters: dict[str, Json] = field(default_factory=dict)
    """batch_size, epochs, steps, clip_norm, noise_multiplier, learning_rate, …"""
    steps: int = 0
    resumed: int = 0
    """How often the run was interrupted and resumed; repeated steps repeat their noise."""
    # Results
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
    """Versions of tacit, python and the numerical packages."""
    created: str = ""
    """UTC time, ISO 8601."""
    version: int = FACTS_VERSION

    @property
    def claim(self) -> Event:
        """The stored `event` decoded to an `Event` object, which accountants can price."""
        return from_dict(self.event)

    def to_dict(self) -> dict[str, Json]:
        """Return the facts as plain JSON values; `from_dict` turns them back into equal facts."""
        return json.loads(json.dumps(asdict(self), allow_nan=False))

    def to_json(self) -> str:
        """Return the facts as JSON text, which is the content of facts.json."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Json]) -> "Facts":
        """Return the facts that `to_dict` wrote; raise `ValueError` if `data` is malformed."""
        if data.get("version") != FACTS_VERSION:
            raise ValueError(
                f"facts must be of version {FACTS_VERSION}, got {data.get('version')!r}."
            )
        try:
            utility = dict(data["utility"])
            for side in ("private", "non_private"):
                utility[side] = tuple(SeedValue(**one) for one in utility[side])
            given = {
                "utility": Utility(**utility),
                "touches": tuple(Touch(**touch) for touch in data["touches"]),
                "released": tuple(data["released"]),
                "assumed_public": tuple(data["assumed_public"]),
            }
            facts = cls(**{**data, **given})
            Relation(facts.relation)
        except (KeyError, TypeError, ValueError) as wrong:
            raise ValueError(f"the facts cannot be read: {wrong}") from None
        return facts


def claim_fields(recipe: Recipe, dataset: Dataset, ledger: Ledger, event: Event) -> dict[str, Json]:
    """Return the fields of `Facts` that state the claim, which every method fills in alike."""
    privacy, relation = recipe.privacy, ledger.relation
    assert privacy.delta is not None  # set by Recipe.filled
    return {
        "event": event.to_dict(),
        "relation": str(relation),
        "unit": ledger.unit,
        "delta": privacy.delta,
        "epsilon": accounting.epsilon(event, delta=privacy.delta, relation=relation),
        "epsilon_target": privacy.epsilon,
        "data": dataset.name,
        "n_records": len(dataset.x_train),
        "seed": "OS entropy" if recipe.run.seed is None else recipe.run.seed,
        "ledger_file": privacy.ledger or LEDGER,
    }


def majority_share(classes: np.ndarray) -> float:
    """Return the share of the most frequent class: the accuracy of always guessing that class."""
    return float(np.bincount(classes).max() / len(classes))


def with_files(facts: Facts, folder: Path, ledger: Ledger) -> Facts:
    """Return `facts` with file hashes, the hash of the last ledger entry, and versions added."""
    uses_torch = facts.method == "DP-SGD"
    return replace(
        facts,
        model_sha256=_sha256(folder / facts.model_file),
        recipe_sha256=_sha256(folder / facts.recipe_file),
        ledger_head=ledger.verify().head,
        versions=_versions(("torch", "numpy", "scipy") if uses_torch else ("numpy", "scipy")),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {"tacit": tacit.__version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # installed without its metadata
            continue
    return found

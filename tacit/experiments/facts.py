"""Facts of a run: what it did to the records, what that costs, and how good the result is.

`facts.json` in the run folder holds them as plain JSON values. Certificates and reports are derived
from facts alone.
"""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import tacit
from tacit import accounting
from tacit._untrusted import printable
from tacit.errors import NotCertified
from tacit.events import Event, Relation, from_dict
from tacit.experiments.recipe import Recipe
from tacit.ledger import Ledger

FACTS_VERSION = 2
ADVERSARY = (
    "sees everything that is listed as released, and knows this program, its settings and all "
    "other records. It does not see the lots, the key of the noise, the secret folder of the run, "
    "or how long steps take"
)

# Names of the files in a run folder; `tacit.experiments.folder` describes them.
RECIPE = "recipe.toml"
METRICS = "metrics.jsonl"
BASELINE = "baseline.jsonl"
MODEL = "model.safetensors"
LEDGER = "run.ledger"
FACTS = "facts.json"
AUDIT = "audit.json"
SECRET = "secret"
REPLAY = "replay"  # folder in secret/ with states of the run
ANSWERS = "answers.jsonl"
STUDENT = "student.npz"
CURVE = "by_answers.jsonl"
CHECK = "check.json"
EVALUATION = "evaluation.json"
SUMMARY = "summary.json"
SAMPLES = "samples.json"
EXPOSURE = "exposure.json"
INPUTS = "inputs.json"

FINETUNE = "DP-SGD fine-tuning"
"""The method of runs that fine-tune a language model."""
_STATED = 1e-10
"""Delta at which a pure guarantee is stated on certificates, which need one. Much smaller ones take
seconds to price for the many releases of a summary."""

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
    """Quality of the released model on test records; `private` is empty if it was not measured.

    The first entry of `private` is the run that these facts describe. A sweep adds the runs that
    differ from it only in the seed. Each of these runs is a separate release with a separate cost:
    `epsilon` covers one of them.
    """

    metric: str
    private: tuple[SeedValue, ...]
    non_private: tuple[SeedValue, ...] = ()
    majority: float | None = None
    """Accuracy of always answering the commonest class of the test records; noisy if the
    evaluation was paid for."""
    others: dict[str, float] = field(default_factory=dict)
    """Further metrics of the run itself, such as loss and auc."""
    n_test: int = 0
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """95 % intervals of metrics that were measured with noise, by name."""

    @property
    def mean(self) -> float | None:
        """Mean of the metric over all seeds; None if it was not measured."""
        if not self.private:
            return None
        return sum(one.value for one in self.private) / len(self.private)

    @property
    def spread(self) -> float | None:
        """Standard deviation of the metric over seeds (divisor n - 1); None for a single seed."""
        n, mean = len(self.private), self.mean
        if n < 2 or mean is None:
            return None
        return (sum((one.value - mean) ** 2 for one in self.private) / (n - 1)) ** 0.5


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
    isolation: str = ""
    """How each example was computed alone, as `Private.isolation` says; empty if not stated."""
    arithmetic: str = ""
    """What is proved about the rounding of the sums that noise was added to."""
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
    """How often the run was interrupted and resumed. Steps are taken again with fresh noise."""
    # Results
    utility: Utility
    model_file: str = MODEL
    model_sha256: str = ""
    recipe_file: str = RECIPE
    recipe_sha256: str = ""
    metrics_file: str = METRICS
    """Empty for a method without measurements along the way."""
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
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the other files of the run, by name."""
    package_sha256: str = ""
    """Hash of the files of the package that made the run (`package_hash`)."""
    ledger_state: dict[str, Json] = field(default_factory=dict)
    """The ledger when the run ended: its id, how many payments it had, which of them are this
    run's, and the three epsilons of all of them at `delta` (`tacit.ledger.Epsilons`)."""
    records_per_person: int = 1
    """Largest number of records of one person for which `epsilon` holds; declared, not checked."""
    adversary: str = ADVERSARY
    version: int = FACTS_VERSION

    @property
    def unmeasured(self) -> str:
        """Why no quality is stated: no evaluation was asked for, or its noise was too large."""
        is_paid = any(touch.what == "evaluation" and touch.cost == "paid" for touch in self.touches)
        return "the noise was too large to state it" if is_paid else "the run has no evaluation"

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
        if not isinstance(data, Mapping) or data.get("version") != FACTS_VERSION:
            stated = data.get("version") if isinstance(data, Mapping) else None
            raise ValueError(
                f"facts must be of format {FACTS_VERSION}, got {printable(repr(stated))}: use the "
                "tacit they were made with."
            )
        try:
            utility = dict(data["utility"])
            for side in ("private", "non_private"):
                utility[side] = tuple(SeedValue(**one) for one in utility[side])
            utility["intervals"] = {n: tuple(ends) for n, ends in utility["intervals"].items()}
            given = {
                "utility": Utility(**utility),
                "touches": tuple(Touch(**touch) for touch in data["touches"]),
                "released": tuple(data["released"]),
                "assumed_public": tuple(data["assumed_public"]),
            }
            facts = cls(**{**data, **given})
            Relation(facts.relation)
            _require_types(facts)
            facts.claim  # noqa: B018  # raises if it is not an event
        except (KeyError, TypeError, ValueError, AttributeError) as wrong:
            raise ValueError(f"the facts cannot be read: {wrong}") from None
        return facts


def claim_fields(
    recipe: Recipe, name: str, n_records: int, ledger: Ledger, event: Event
) -> dict[str, Json]:
    """Return the fields of `Facts` that state the claim, which every method fills in alike.

    `name` and `n_records` are those of the data set.
    """
    privacy, relation = recipe.privacy, ledger.relation
    assert privacy.delta is not None  # set by Recipe.filled
    delta = privacy.delta or _STATED
    return {
        "event": event.to_dict(),
        "relation": str(relation),
        "unit": ledger.unit,
        "delta": delta,
        "epsilon": accounting.epsilon(event, delta=delta, relation=relation),
        "epsilon_target": privacy.epsilon,
        "data": name,
        "n_records": n_records,
        "seed": "OS entropy" if recipe.run.seed is None else recipe.run.seed,
        "ledger_file": privacy.ledger or LEDGER,
    }


def majority_share(classes: np.ndarray) -> float:
    """Return the share of the most frequent class: the accuracy of always guessing that class."""
    return float(np.bincount(classes).max() / len(classes))


def with_files(facts: Facts, folder: Path, ledger: Ledger) -> Facts:
    """Return `facts` with hashes of files and package, versions, and the ledger's state added.

    The hashes of model, recipe and facts are sealed into the ledger as its last row, and the hash
    of that row becomes `ledger_head`. So none of these parts can be exchanged alone.
    """
    uses_torch = facts.method in ("DP-SGD", FINETUNE)
    head = ledger.verify().head
    others = {facts.metrics_file, facts.baseline_file, ANSWERS, CURVE, CHECK, EVALUATION} - {None}
    others |= set(facts.files)  # those that only this kind of run has
    facts = replace(
        facts,
        model_sha256=file_hash(folder / facts.model_file),
        recipe_sha256=file_hash(folder / facts.recipe_file),
        versions=versions(("torch", "numpy", "scipy") if uses_torch else ("numpy", "scipy")),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        files={n: file_hash(folder / n) for n in sorted(others) if (folder / n).is_file()},
        package_sha256=package_hash(),
        ledger_file=_ledger_file(ledger, folder),
        ledger_state=ledger_state(ledger, delta=facts.delta, head=head, own=_own(ledger, folder)),
        version=FACTS_VERSION,
    )
    return replace(facts, ledger_head=ledger.seal(json.dumps(seal_of(facts), sort_keys=True)))


def seal_of(facts: Facts | Mapping[str, Json]) -> dict[str, Json]:
    """Return the hashes that the ledger's last row holds for a run.

    `facts` may be the content of facts.json, which has no fields that were added after it was
    written. All facts are hashed but `ledger_head`, the hash of the row that holds their hash.
    """
    stored = facts.to_dict() if isinstance(facts, Facts) else facts
    text = json.dumps({**stored, "ledger_head": ""}, sort_keys=True)
    return {
        "model_sha256": stored["model_sha256"],
        "recipe_sha256": stored["recipe_sha256"],
        "facts_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def ledger_state(ledger: Ledger, *, delta: float, head: str, own: Sequence[int]) -> dict[str, Json]:
    """Return what `Facts.ledger_state` holds, of the ledger up to the row with hash `head`.

    `own` are the numbers of the entries that paid for the run.
    """
    history = ledger.history(head=head)
    found: dict[str, Json] = {"id": ledger.id, "entries": len(history), "entries_of_run": own}
    try:
        epsilons = ledger.epsilons(delta=delta, head=head)._asdict()
    except NotCertified:  # too many different parts for double precision
        epsilons = {}
    finite = {name: v if v is None or np.isfinite(v) else None for name, v in epsilons.items()}
    return found | {"epsilon": finite}


def _ledger_file(ledger: Ledger, folder: Path) -> str:
    """Return the ledger's file name in the run folder, or its full path elsewhere."""
    if ledger.path is None or ledger.path == (folder / LEDGER).resolve():
        return LEDGER
    return str(ledger.path)


def _own(ledger: Ledger, folder: Path) -> list[int]:
    if _ledger_file(ledger, folder) == LEDGER:  # it pays for this run alone
        return [entry.id for entry in ledger.history()]
    return sorted(ledger.used)


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file, read in blocks so that large files fit in memory."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def package_hash() -> str:
    """Return a hash over the names and contents of all files of the installed package."""
    return folder_hash(Path(tacit.__file__).parent)


def folder_hash(root: Path) -> str:
    """Return a hash over the names and contents of all files below a folder.

    Files that Python caches do not count.
    """
    found = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(path.relative_to(root).as_posix().encode() + b"\0")
            found.update(bytes.fromhex(file_hash(path)))
    return found.hexdigest()


def _require_types(facts: Facts) -> None:
    """Raise `TypeError` if a field of facts from a file has a value of another kind."""
    numbers = (facts.delta, facts.epsilon, facts.n_records, facts.steps, facts.resumed)
    texts = [getattr(facts, f.name) for f in fields(Facts) if f.type is str]
    texts += [*facts.released, *facts.assumed_public, *facts.versions.values()]
    names = {facts.model_file, facts.recipe_file, facts.metrics_file, facts.baseline_file}
    names -= {None, ""}
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in numbers):
        raise TypeError("a number is missing")
    if not all(isinstance(v, str) for v in texts):
        raise TypeError("a text is missing")
    if not all(isinstance(n, str) and n == Path(n).name for n in names):
        raise TypeError("a file must be named without a folder")
    if not all(isinstance(d, dict) for d in (facts.hyperparameters, facts.files, facts.event)):
        raise TypeError("an object is missing")


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of tacit, of Python and of the installed `packages`, by name."""
    found = {"tacit": tacit.__version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # installed without its metadata
            continue
    return found

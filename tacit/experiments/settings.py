"""The sections of a recipe: every setting, its default, its rule."""

import difflib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from tacit._check import in_closed_unit, in_open_unit, non_negative, positive, whole
from tacit.events import Relation

Value = Any  # Any: TOML values


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is learned from."""

    name: str = "digits"
    """digits, mnist, fashion-mnist, or table."""
    path: str = ""
    """Folder of the idx files, or the table's file; relative to --data or TACIT_DATA."""
    is_public: bool | None = None
    """Whether the records are public, so that a non-private twin may be trained beside and attacks
    shown; default yes, but no for a table: see `holds_public_records`."""
    test_share: float = 0.2
    """Share of a table's rows that is assumed public and measured on."""
    split_seed: int = 0
    validation_share: float = 0.0
    """Measure on this share of the training records instead of the test split, to tune."""
    schema: dict[str, Value] = field(default_factory=dict)
    """A table's declared columns, see `tacit.datasets.Schema`."""

    def __post_init__(self) -> None:
        _one_of("data.name", self.name, ("digits", "mnist", "fashion-mnist", "table"))
        _check(in_open_unit, "data.test_share", self.test_share)
        if not 0 <= self.validation_share < 1:
            raise ValueError(
                f"data.validation_share must be in [0, 1), got {self.validation_share}."
            )
        if self.name == "table" and not (self.path and self.schema):
            raise ValueError("a table needs data.path, and its columns under [data.schema].")

    @property
    def holds_public_records(self) -> bool:
        """What `is_public` says; if it says nothing, whether the set is one of the published."""
        return self.name != "table" if self.is_public is None else self.is_public


@dataclass(frozen=True, kw_only=True)
class Features:
    """What becomes of a record before the model sees it."""

    kind: str = "none"
    """none, scattering, pca (paid for), or projection (random, free)."""
    scales: int = 2
    angles: int = 8
    groups: int = 27
    """Groups of channels in which each image's scattering is standardized."""
    contrast: bool = False
    """Then standardize the channels at each place of the image; free."""
    even_noise_multiplier: float = 0.0
    """Of the one release by which scattering's main directions are evened out; 0 for none."""
    even: int = 300
    """Coarsest frequencies of the scattering in which those directions are sought."""
    components: int = 60
    """Dimensions kept by pca and projection."""
    noise_multiplier: float = 16.0
    """Of the private PCA's one release."""
    whiten: float = 0.0
    """How far the components are brought to one scale, by that release: 0 not at all, 1 fully."""
    mean_noise_multiplier: float = 0.0
    """Of the private mean's one release, which centers the records; 0 leaves them as they are."""

    def __post_init__(self) -> None:
        _one_of("features.kind", self.kind, ("none", "scattering", "pca", "projection"))
        for name in ("scales", "angles", "groups", "even", "components"):
            _check(whole, f"features.{name}", getattr(self, name), least=1)
        _check(in_closed_unit, "features.whiten", self.whiten)
        _check(positive, "features.noise_multiplier", self.noise_multiplier)
        _check(non_negative, "features.mean_noise_multiplier", self.mean_noise_multiplier)
        _check(non_negative, "features.even_noise_multiplier", self.even_noise_multiplier)


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained."""

    kind: str = "linear"
    """linear, mlp, cnn, or module (any importable nn.Module)."""
    hidden: tuple[int, ...] = (1000,)
    activation: str = "relu"
    """relu or tanh (tempered: bounded activations keep gradients small)."""
    channels: tuple[int, ...] = (16, 32)
    module: str = ""
    """For kind module: "package.module:Name"."""
    arguments: dict[str, Value] = field(default_factory=dict)
    """Keyword arguments of the module."""

    def __post_init__(self) -> None:
        _one_of("model.kind", self.kind, ("linear", "mlp", "cnn", "module"))
        _one_of("model.activation", self.activation, ("relu", "tanh"))
        for width in (*self.hidden, *self.channels):
            _check(whole, "model.hidden and model.channels", width, least=1)
        if (self.kind == "module") != bool(self.module):
            raise ValueError(
                'model.module = "package.module:Name" goes with model.kind = "module".'
            )


@dataclass(frozen=True, kw_only=True)
class Training:
    """How it is trained; the guarantee follows from these and [privacy]."""

    batch_size: int | None = None
    """Expected lot; default about an eighth of the records."""
    epochs: float = 30.0
    clip_norm: float = 1.0
    learning_rate: float = 0.5
    learning_rate_end: float | None = None
    """Reached linearly after `decay_epochs`, then kept; default the rate at the start."""
    decay_epochs: float | None = None
    """Default the whole run."""
    momentum: float = 0.9
    optimizer: str = "sgd"
    """sgd, or adam (corrected for the noise)."""
    average: float = 0.9
    """Decay of the running mean of the weights that is released; 0 for the last weights."""
    shrink: int = 1
    """For cheap tuning on public data: lot and noise divided by this, as many steps. What a step
    learns depends on lot / noise, so settings that do well here do well in full (Sander, Stock &
    Sablayrolles 2023, arXiv:2210.03403). Costs far more than the epsilon asked for, and says so."""
    max_microbatch: int | None = None
    """Most rows at once; default by the memory at hand."""

    def __post_init__(self) -> None:
        _one_of("training.optimizer", self.optimizer, ("sgd", "adam"))
        for name in ("epochs", "clip_norm", "learning_rate"):
            _check(positive, f"training.{name}", getattr(self, name))
        for name in ("learning_rate_end", "decay_epochs"):
            if getattr(self, name) is not None:
                _check(positive, f"training.{name}", getattr(self, name))
        _check(whole, "training.shrink", self.shrink, least=1)
        for name in ("batch_size", "max_microbatch"):
            if getattr(self, name) is not None:
                _check(whole, f"training.{name}", getattr(self, name), least=1)
        for name in ("momentum", "average"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"training.{name} must be in [0, 1), got {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """What it may cost."""

    epsilon: float = 3.0
    delta: float | None = None
    """Default 1e-5, or a tenth of 1 / records where that is smaller."""
    relation: str = str(Relation.ADD_REMOVE)
    unit: str = "record"
    ledger: str = ""
    """File of the data set's own ledger; default one in the run folder."""

    def __post_init__(self) -> None:
        _check(positive, "privacy.epsilon", self.epsilon)
        if self.delta is not None:
            _check(in_open_unit, "privacy.delta", self.delta)
        _one_of("privacy.relation", self.relation, tuple(Relation))


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything else."""

    seed: int | None = None
    """Makes lots and noise reproducible, hence removable; default the system's entropy."""
    checkpoint_seconds: float = 20.0
    """How much work an interruption may cost."""
    baseline_steps: int = 3000
    """Length of the non-private twin; 0 for none."""
    baseline_rate: float = 3e-3
    """Adam's rate at the twin's start; it falls to 0."""

    def __post_init__(self) -> None:
        if self.seed is not None:
            _check(whole, "run.seed", self.seed)
        _check(non_negative, "run.checkpoint_seconds", self.checkpoint_seconds)
        _check(whole, "run.baseline_steps", self.baseline_steps)
        _check(positive, "run.baseline_rate", self.baseline_rate)


@dataclass(frozen=True, kw_only=True)
class Published:
    """What others report for the same data, to be drawn beside the runs."""

    epsilon: float
    accuracy: float
    source: str

    def __post_init__(self) -> None:
        _check(positive, "published.epsilon", self.epsilon)
        _check(in_open_unit, "published.accuracy", self.accuracy)


def section(kind: type, data: Mapping[str, Value], where: str) -> Any:
    """An instance of the dataclass `kind` from TOML values, checked key by key."""
    if not isinstance(data, Mapping):
        raise ValueError(f"[{where}] must be a table, got {type(data).__name__}.")
    hints = typing.get_type_hints(kind)
    known = [f.name for f in fields(kind)]
    for name in data:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            advice = f"Did you mean {close[0]!r}?" if close else f"It has {', '.join(known)}."
            raise ValueError(f"[{where or 'recipe'}] has no {name!r}. {advice}")
    for f in fields(kind):
        if f.default is MISSING and f.default_factory is MISSING and f.name not in data:
            raise ValueError(f"[{where}] needs {f.name!r}.")
    dotted = f"{where}." if where else ""
    return kind(**{name: cast(hints[name], value, dotted + name) for name, value in data.items()})


def cast(hint: Any, value: Value, name: str) -> Value:
    """`value` as the annotated type; whole numbers pass for floats."""
    if hasattr(hint, "__dataclass_fields__"):
        return section(hint, value, name)
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    origin = typing.get_origin(hint) or hint
    if origin is tuple and isinstance(value, list | tuple):
        inner = typing.get_args(hint)[0]
        return tuple(cast(inner, item, name) for item in value)
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, origin) or (isinstance(value, bool) and origin is not bool):
        wanted = {float: "a number", int: "a whole number", str: "text in quotes"}
        wanted |= {bool: "true or false", tuple: "a list", dict: "a table"}
        raise ValueError(f"{name} must be {wanted[origin]}, got {value!r}.")
    return value


def _check(rule: Callable[..., object], name: str, value: object, **options: Any) -> None:
    """`rule` of `tacit._check` on a setting with a dotted name."""
    try:
        rule(**{name: value}, **options)
    except TypeError as wrong:
        raise ValueError(str(wrong)) from None


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        close = difflib.get_close_matches(value, allowed, 1)
        advice = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.{advice}")

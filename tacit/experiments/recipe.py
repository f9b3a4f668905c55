"""Recipes: one TOML file states the data, the method with its settings, and the budget of a run.

Every key has a default, so an empty file is a recipe. The run folder receives the recipe with every
default written out. An unknown key raises an error that names the closest known one. `[[at]]` gives
settings for several epsilons, which `Recipe.for_epsilon` interpolates.

    method = "dp-sgd"       # or "finetune", "pate", "regression", "summary", "transfer"
    [data]
    name = "mnist"
    [features]
    kind = "scattering"
    [privacy]
    epsilon = 3.0

DP-SGD reads the sections data, features, model, training, privacy, run, at and published; PATE
reads data, teachers, answers, privacy and run; a regression reads data, regression, privacy and
run; a summary and a transfer read the section of their name in its place. Fine-tuning reads text,
language_model, finetune, canaries, samples, privacy and run.
"""

import math
import tomllib
import typing
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import tomli_w

from tacit import _untrusted
from tacit._check import in_closed_unit, in_open_unit, non_negative, one_of, positive, whole
from tacit.events import Event, Relation
from tacit.experiments.layer_table import MOST_LAYERS, require_trusted
from tacit.experiments.settings import (
    RecipeSection,
    Value,
    at_least_one,
    below_one,
    cast,
    choice,
    from_table,
    number_of_bands,
    setting,
)
from tacit.experiments.text_settings import (
    CanarySettings,
    FinetuneSettings,
    LanguageModelSettings,
    SampleSettings,
    TextSettings,
)
from tacit.ledger import Budget
from tacit.pate import Aggregator, ConfidentGNMax, GNMax, LaplaceMax

SHIPPED = resources.files("tacit.experiments") / "recipes"
_SECTIONS = {  # that no other method reads
    "dp-sgd": ("features", "model", "training", "at", "published"),
    "pate": ("teachers", "answers"),
    "finetune": ("text", "language_model", "finetune", "canaries", "samples"),
    **{name: (name,) for name in ("regression", "summary", "transfer")},
}
_UNUSED = {m: [s for other in _SECTIONS if other != m for s in _SECTIONS[other]] for m in _SECTIONS}
_UNUSED["finetune"].append("data")  # its records are those of [text]
_DEFAULTS = {  # of [privacy]
    "dp-sgd": {"epsilon": 3.0},
    "pate": {"delta": 1e-5},
    "regression": {"epsilon": 1.0, "delta": 1e-6},
    "summary": {"epsilon": 1.0, "delta": 0.0},
    "transfer": {"epsilon": 1.0, "delta": 1e-6},
    "finetune": {"epsilon": 3.0},
}
_NEED_DELTA = ("dp-sgd", "pate", "transfer", "finetune")
MOST_OUTSIDE = 0.1
"""Largest share of the values of a column that a schema may fail to describe, by default."""
_UNSET = (None, {})  # values of optional settings that TOML leaves out


@dataclass(frozen=True, kw_only=True)
class DataSettings(RecipeSection, section="data"):
    """Section [data]: the records to learn from."""

    name: str = choice("digits", "mnist", "fashion-mnist", "cifar10", "table")
    path: str = ""
    """Folder of the images, or the table's file; relative to --data or TACIT_DATA."""
    is_public: bool | None = None
    """Whether the records are public, so that a twin may be trained on them without privacy and
    attacks may be shown. Default: False for a table, True for a published data set."""
    test_share: float = setting(0.2, in_open_unit)
    """Share of a table's rows that is held out to measure the model."""
    public_test: str = ""
    """Table that is declared public, to measure the model exactly; nothing is then held out."""
    evaluation: str = choice("paid", "none")
    """How a private table measures the model: with noise, paid for, or not at all."""
    evaluation_share: float = setting(0.1, in_open_unit)
    """Share of epsilon that the paid evaluation spends."""
    check_share: float = setting(0.05, below_one)
    """Share of epsilon that the check of a private table by its schema spends; 0 for no check."""
    most_outside: float = setting(MOST_OUTSIDE, in_open_unit)
    """Largest share of values of a column that the schema may fail to describe."""
    public_sample: str = ""
    """Table of the same form that is declared public: the check is then made on it, for free."""
    split_seed: int = 0
    validation_share: float = setting(0.0, below_one)
    """For tuning: measure on this share of the training records instead of the test split."""
    schema: dict[str, Value] = field(default_factory=dict)
    """Declared columns of a table; see `tacit.datasets.Schema`."""
    records_per_person: int = setting(1, at_least_one)
    """Most records of each person that are used, if the schema has a column of type person."""
    sampled: str = choice("persons", "records")
    """What lots are random samples of, if persons have several records; see docs/users.md."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name == "table" and not (self.path and self.schema):
            raise ValueError("a table needs data.path, and its columns under [data.schema].")
        if self.validation_share and not self.holds_public_records:
            raise ValueError(
                "data.validation_share measures without noise, so it needs data.is_public = true. "
                "A private table is measured with noise on data.test_share of its records."
            )

    @property
    def holds_public_records(self) -> bool:
        """Whether the records count as public: `is_public`, or by default all but tables."""
        return self.name != "table" if self.is_public is None else self.is_public


@dataclass(frozen=True, kw_only=True)
class FeatureSettings(RecipeSection, section="features"):
    """Section [features]: how a record is transformed before the model sees it."""

    kind: str = choice("none", "scattering", "pca", "projection")
    """pca is paid for; scattering and projection (random) are free."""
    scales: int = setting(2, at_least_one)
    angles: int = setting(8, at_least_one)
    pool: int = setting(1, at_least_one)
    """Average scattering over squares with this many positions on a side; free."""
    log_scale: float = setting(0.0, non_negative)
    """Compress scattering to log(1 + x / log_scale) / log(1 + 1 / log_scale); 0 for none. Free."""
    groups: int = setting(27, whole)
    """Channel groups in which the scattering of each image is standardized; 0 for none."""
    contrast: bool = False
    """Also standardize the channels at each position of the image; free."""
    even_noise_multiplier: float = setting(0.0, non_negative)
    """Noise of the one release that shortens the main directions of the scattering; 0 for none."""
    even: int = setting(300, at_least_one)
    """Number of coarsest scattering frequencies among which those directions are sought."""
    components: int = setting(60, at_least_one)
    """Number of dimensions that pca and projection keep."""
    noise_multiplier: float = setting(16.0, positive)
    """Noise of the one release of the private PCA."""
    whiten: float = setting(0.0, in_closed_unit)
    """How far the PCA scales its components to equal size, from 0 (not at all) to 1 (fully)."""
    mean_noise_multiplier: float = setting(0.0, non_negative)
    """Noise of the one release of the mean, which centers the records; 0 for no centering."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings(RecipeSection, section="model"):
    """Section [model]: the architecture that is trained."""

    kind: str = choice("linear", "mlp", "cnn", "module")
    """module is a layer of torch.nn, or an nn.Module whose code the reader of the recipe trusts."""
    hidden: tuple[int, ...] = (1000,)
    activation: str = choice("relu", "tanh")
    """tanh is bounded, which keeps gradients small."""
    channels: tuple[int, ...] = (16, 32)
    module: str = ""
    """For kind module: "torch.nn:Name" (see `layer_table`), or "package.module:Name"."""
    arguments: dict[str, Value] = field(default_factory=dict)
    """Keyword arguments of the module."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for width in (*self.hidden, *self.channels):
            at_least_one(**{"model.hidden and model.channels": width})
        if len(self.hidden) + len(self.channels) > MOST_LAYERS:
            raise ValueError(f"a model may have at most {MOST_LAYERS:,} layers.")
        if (self.kind == "module") != bool(self.module):
            raise ValueError('model.module = "package.module:Name" needs model.kind = "module".')


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(RecipeSection, section="training"):
    """Section [training]: the steps of DP-SGD. Together with [privacy] it fixes the guarantee."""

    batch_size: int | None = setting(None, at_least_one)
    """Expected number of records in a lot; default about an eighth of the records."""
    epochs: float = setting(30.0, positive)
    clip_norm: float = setting(1.0, positive)
    learning_rate: float = setting(0.5, positive)
    learning_rate_end: float | None = setting(None, positive)
    """Reached linearly after `decay_epochs`, then constant; default `learning_rate`."""
    decay_epochs: float | None = setting(None, positive)
    """Default the whole run."""
    momentum: float = setting(0.9, below_one)
    views: int | None = setting(None, at_least_one)
    """Random shifts and mirror images that a step averages before clipping; default 1. Free."""
    optimizer: str = choice("sgd", "adam")
    """adam corrects its second moment for the noise."""
    average: float = setting(0.9, below_one)
    """Decay of the running mean of the weights, which is released; 0 releases the last weights."""
    shrink: int = setting(1, at_least_one)
    """For cheap tuning on public data: divide lot and noise by this number and keep the number of
    steps. What a step learns depends on lot / noise (Sander, Stock & Sablayrolles 2023,
    arXiv:2210.03403). The run costs far more than its epsilon, and its facts state that price."""
    bands: int | str | None = setting(None, number_of_bands)
    """Steps over which noise is correlated: a number, or "auto" for the one with the least noise of
    running sums. Default 1, independent noise. With more, `average` is replaced by the mean weights
    of the last quarter of the steps. See docs/correlated-noise.md."""
    loss_upper: float | None = setting(None, positive)
    """Release a noisy training loss, clipped to this value; see docs/callbacks.md. Default none."""
    max_microbatch: int | None = setting(None, at_least_one)
    """Most rows on the device at once; default chosen from the available memory."""

    @property
    def batch(self) -> int:
        """`batch_size`, by which epochs are counted, of a recipe with defaults filled in."""
        assert self.batch_size is not None  # set by Recipe.filled
        return self.batch_size

    @property
    def lot(self) -> int:
        """Expected number of records in one step, after `shrink`, with defaults filled in."""
        return max(1, self.batch // self.shrink)

    @property
    def correlated(self) -> int:
        """Number of bands of a recipe with defaults filled in; 1 for independent noise."""
        assert self.bands != "auto"  # set by Recipe.filled
        return 1 if self.bands is None else int(self.bands)


@dataclass(frozen=True, kw_only=True)
class TeacherSettings(RecipeSection, section="teachers"):
    """Section [teachers] of PATE: the models whose votes label the public inputs."""

    count: int = setting(50, at_least_one)
    width: float = setting(0.85, positive)
    ridge: float = setting(0.03, positive)
    jobs: int | None = field(default=None, compare=False)
    """Teachers trained at the same time. Recipes that differ only in this setting are equal."""


@dataclass(frozen=True, kw_only=True)
class AnswerSettings(RecipeSection, section="answers"):
    """Section [answers] of PATE: the queries and the noise on the vote counts."""

    queries: int = setting(40, at_least_one)
    public_share: float = setting(2 / 3, in_open_unit)
    """Share of the test split whose inputs the student may query; the rest measures the student."""
    mechanism: str = choice("gaussian", "laplace")
    """GNMax or LNMax."""
    noise: float | None = None
    """Standard deviation (or Laplace scale) in votes; default a fifth of the teachers."""
    threshold: float | None = None
    """Answer only if the noisy largest count reaches this value (Confident-GNMax)."""
    threshold_noise: float | None = None
    most: int | None = None
    """Stop after this many answers; with a threshold, this limit bounds the claimed cost."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.threshold is None) != (self.threshold_noise is None):
            raise ValueError("answers.threshold and answers.threshold_noise go together.")
        if self.mechanism == "laplace" and self.threshold is not None:
            raise ValueError("answers.threshold needs gaussian noise.")

    def aggregator(self, n_teachers: int) -> Aggregator:
        """Return the aggregator that these settings describe."""
        noise = n_teachers / 5 if self.noise is None else self.noise
        if self.mechanism == "laplace":
            return LaplaceMax(noise)
        if self.threshold is None or self.threshold_noise is None:
            return GNMax(noise)
        return ConfidentGNMax(
            threshold=self.threshold, sigma_threshold=self.threshold_noise, sigma_answer=noise
        )


@dataclass(frozen=True, kw_only=True)
class RegressionSettings(RecipeSection, section="regression"):
    """Section [regression]: how a linear or logistic model of a table is fitted."""

    method: str = choice(
        "auto", "functional", "adassp", "gradient", "descent", "objective", "frank-wolfe"
    )
    """Linear: functional, adassp or gradient. Logistic: gradient, descent or objective.
    frank-wolfe is for wide tables, and fits a number or two classes."""
    radius: float | None = setting(None, positive)
    """Of frank-wolfe: largest sum of absolute scaled coefficients; default by the budget."""

    def __post_init__(self) -> None:
        if self.method == "sgd":
            raise ValueError(
                "regression.method 'sgd' is gone: write 'gradient', or 'descent' for a wide table."
            )
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class SummarySettings(RecipeSection, section="summary"):
    """Section [summary]: the statistics of a table."""

    quantiles: tuple[float, ...] = (0.25, 0.5, 0.75)
    about: str = choice("population", "records")
    """What the intervals of means, deviations, quantiles and shares are about."""
    confidence: float = setting(0.95, in_open_unit)
    """Confidence of each interval."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 < p < 1 for p in self.quantiles):
            raise ValueError("summary.quantiles: each probability must be in (0, 1).")


@dataclass(frozen=True, kw_only=True)
class TransferSettings(RecipeSection, section="transfer"):
    """Section [transfer]: related tables that help to fit a linear model of the table."""

    sources: tuple[str, ...] = ()
    """Files of the related tables, found like `data.path`."""
    h: float | None = setting(None, non_negative)
    """Declared distance of related tables' coefficients; default: they must be seen to help."""
    q: int = setting(2, partial(whole, least=1))
    """Norm of that distance and of the penalty: 1 or 2."""
    penalty: float | None = setting(None, non_negative)
    """lambda: price of coefficients that differ from related tables'; default by the noise."""
    overlapping: bool = False
    """Whether a person may be in several files, so that their costs add up."""


@dataclass(frozen=True, kw_only=True)
class PrivacySettings(RecipeSection, section="privacy"):
    """Section [privacy]: the budget and the terms of the guarantee."""

    epsilon: float | None = setting(None, positive)
    """DP-SGD calibrates its noise to this value, by default 3. PATE stops answering before it is
    passed, by default never."""
    delta: float | None = setting(None, below_one)
    """Default 1e-5; for DP-SGD, 0.1 / records where that is smaller. A regression or summary also
    takes 0, for pure differential privacy."""
    relation: str = choice(*map(str, Relation))
    unit: str = "record"
    ledger: str = ""
    """Ledger file of the data set; default a ledger in the run folder."""

    @property
    def budget(self) -> Budget:
        """Epsilon and delta as a budget, for a recipe whose defaults are filled in."""
        assert self.epsilon is not None  # set by Recipe.filled
        assert self.delta is not None
        return Budget(self.epsilon, self.delta)


@dataclass(frozen=True, kw_only=True)
class RunSettings(RecipeSection, section="run"):
    """Section [run]: device, randomness, twin, states for a replay. PATE reads the seed only."""

    seed: int | None = setting(None, whole)
    """Makes sampling and noise reproducible, so the noise can be removed; default OS entropy."""
    device: str = choice("cpu", "cuda")
    """Where DP-SGD trains. On a GPU, steps are compiled and models compute in bfloat16."""
    baseline_steps: int = setting(3000, whole)
    """Steps of the twin: the same model without clipping or noise. 0 for no twin."""
    baseline_rate: float = setting(3e-3, positive)
    """Initial Adam learning rate of the twin; it falls linearly to 0."""
    stretches: int | None = setting(None, partial(whole, least=1))
    """Parts of a DP-SGD run that `tacit verify --replay` can compute again. Their states stay in
    secret/ with the key of the noise, and whoever has the key can subtract the noise."""


@dataclass(frozen=True, kw_only=True)
class Published(RecipeSection, section="published"):
    """One accuracy that a paper reports for the same data, drawn in figures for comparison."""

    epsilon: float = field(metadata={"rule": positive})
    accuracy: float = field(metadata={"rule": in_open_unit})
    source: str


_ADJUSTED: dict[str, type] = {"features": FeatureSettings, "training": TrainingSettings}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run, checked; made by `read`, `parse` or `from_dict`.

    >>> Recipe.parse('[privacy]\\nepsilon = 1').privacy.epsilon
    1.0
    >>> Recipe.parse('[training]\\nepoch = 3')
    Traceback (most recent call last):
    ValueError: [training] has no 'epoch'. Did you mean 'epochs'?
    """

    method: str = "dp-sgd"
    """dp-sgd, finetune, pate, regression, summary or transfer."""
    name: str = "digits"
    data: DataSettings = field(default_factory=DataSettings)
    features: FeatureSettings = field(default_factory=FeatureSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    teachers: TeacherSettings = field(default_factory=TeacherSettings)
    answers: AnswerSettings = field(default_factory=AnswerSettings)
    regression: RegressionSettings = field(default_factory=RegressionSettings)
    summary: SummarySettings = field(default_factory=SummarySettings)
    transfer: TransferSettings = field(default_factory=TransferSettings)
    text: TextSettings = field(default_factory=TextSettings)
    language_model: LanguageModelSettings = field(default_factory=LanguageModelSettings)
    finetune: FinetuneSettings = field(default_factory=FinetuneSettings)
    canaries: CanarySettings = field(default_factory=CanarySettings)
    samples: SampleSettings = field(default_factory=SampleSettings)
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    run: RunSettings = field(default_factory=RunSettings)
    at: tuple[dict[str, Value], ...] = ()
    """Settings of [features] and [training] for given epsilons."""
    published: tuple[Published, ...] = ()
    """Published results to compare with; they change nothing about a run."""

    def __post_init__(self) -> None:
        one_of(tuple(_UNUSED), method=self.method)
        given = {k: v for k, v in asdict(self.privacy).items() if v is not None}
        privacy = PrivacySettings(**{**_DEFAULTS[self.method], **given})
        object.__setattr__(self, "privacy", privacy)
        if privacy.delta == 0 and self.method in _NEED_DELTA:
            raise ValueError(f"privacy.delta must be above 0 for {self.method}, got 0.")
        for given in self.at:
            if not isinstance(given.get("epsilon"), int | float) or given["epsilon"] <= 0:
                raise ValueError("each [[at]] needs the epsilon it is for, as in epsilon = 1.0.")
            for section, settings in given.items():
                if section in _ADJUSTED:
                    from_table(_ADJUSTED[section], settings, f"at.{section}")
                elif section != "epsilon":
                    raise ValueError(f"[[at]] has epsilon, features and training, not {section!r}.")

    @classmethod
    def parse(cls, text: str, *, method: str = "dp-sgd", trust_code: Collection[str] = ()) -> Self:
        """Return the recipe in TOML text; `method` applies if the text names no method.

        The text may name a class of `layer_table` as its model. Any other module raises
        `ValueError`, unless `trust_code` names that module: then its code may run.
        """
        if len(text) > _untrusted.MOST_BYTES:
            raise ValueError(f"a recipe has at most {_untrusted.MOST_BYTES:,} characters.")
        try:
            data = tomllib.loads(text)
        except RecursionError:
            raise ValueError("the recipe is nested too deeply to be read.") from None
        except ValueError as wrong:  # TOMLDecodeError, or an impossible date or number
            raise ValueError(f"the recipe is not TOML: {wrong}.") from None
        return cls.from_dict(data, method=method, trust_code=trust_code)

    @classmethod
    def from_dict(
        cls,
        data: Mapping[str, Value],
        *,
        method: str = "dp-sgd",
        trust_code: Collection[str] = (),
    ) -> Self:
        """Return the recipe in nested dictionaries, in the form that a TOML parser returns."""
        recipe = cls._of(data, method)
        recipe.require_trusted(trust_code)
        return recipe

    @classmethod
    def _of(cls, data: Mapping[str, Value], method: str = "dp-sgd") -> Self:
        data = _with_method(data, method)
        unused = _UNUSED.get(data["method"], ()) if isinstance(data["method"], str) else ()
        for name in unused:
            if name in data:
                raise ValueError(f'[{name}] cannot be used with method = "{data["method"]}".')
        return from_table(cls, data, "")

    @classmethod
    def read(
        cls, name: str | Path, *, method: str = "dp-sgd", trust_code: Collection[str] = ()
    ) -> Self:
        """Return the recipe in the file `name`, or the recipe of that name in the package.

        `trust_code` lists modules whose code the recipe may run, see `parse`.
        """
        path = Path(name)
        if path.suffix in (".csv", ".gz", ".parquet"):
            raise ValueError(
                f"{path.name} is a table, and no recipe. Give a recipe of it, such as recipe.toml "
                "in the run folder that tacit train made of the table."
            )
        if path.suffix == ".toml" or path.is_file():
            text = _untrusted.read_text(path)
            return cls.parse(text, method=method, trust_code=trust_code)
        if str(name) not in shipped():
            raise ValueError(
                f"{name} is neither a recipe file (.toml) nor a shipped recipe. "
                f"Shipped: {', '.join(shipped())}."
            )
        return cls.parse((SHIPPED / f"{name}.toml").read_text(encoding="utf-8"), method=method)

    def require_trusted(self, trust_code: Collection[str]) -> None:
        """Raise `ValueError` if the model is a module outside the table and `trust_code`."""
        if self.method == "dp-sgd" and self.model.kind == "module":
            require_trusted(self.model.module, self.model.arguments, trust_code)

    def with_settings(self, settings: Mapping[str, Value]) -> Self:
        """Return a copy with settings changed, also in `[[at]]`; None changes nothing.

        >>> Recipe().with_settings({"training.epochs": 20, "run.seed": None}).training.epochs
        20.0
        """
        data = self.to_dict()
        for dotted, value in ((d, v) for d, v in settings.items() if v is not None):
            *path, name = dotted.split(".")
            inner = data
            for part in path:
                inner = inner.setdefault(part, {})
                if not isinstance(inner, dict):
                    raise ValueError(f"{dotted} is not a setting of a recipe.")
            inner[name] = value
            for given in data.get("at", ()):  # the setting then holds for every epsilon
                given.get(path[0] if path else "", {}).pop(name, None)
        return type(self)._of(data)

    def for_epsilon(self, epsilon: float) -> Self:
        """Return this recipe for one epsilon, with settings taken from the `[[at]]` sections.

        Numbers between two epsilons of `[[at]]` are interpolated on logarithmic axes. Beyond the
        smallest or largest epsilon, the nearest section is used. The choice uses no data. The
        result has no `[[at]]` sections.
        """
        epsilon = float(epsilon)  # 1 and 1.0 are the same recipe
        points = sorted(self.at, key=lambda given: given["epsilon"])
        changed: dict[str, Any] = {}
        for part, kind in _ADJUSTED.items():
            given = [(point["epsilon"], point.get(part, {})) for point in points]
            hints = typing.get_type_hints(kind)
            chosen = {
                name: cast(
                    hints[name],
                    _interpolate([(e, s[name]) for e, s in given if name in s], epsilon),
                    f"at.{part}.{name}",
                )
                for name in dict.fromkeys(name for _, settings in given for name in settings)
            }
            changed[part] = replace(getattr(self, part), **chosen)
        return replace(self, **changed, at=(), privacy=replace(self.privacy, epsilon=epsilon))

    def filled(
        self, n_records: int, also: tuple[Event, ...] = (), *, parameters: int | None = None
    ) -> Self:
        """Return this recipe with every default of a DP-SGD run replaced by its value.

        Some defaults depend on `n_records`, which is assumed public. `also` and `parameters`, for
        bands = "auto", are those of `training_loop.best_bands`.
        """
        assert self.privacy.epsilon is not None  # DP-SGD: set in __post_init__
        recipe = self.for_epsilon(self.privacy.epsilon)
        training, privacy = recipe.training, recipe.privacy
        privacy = replace(privacy, delta=privacy.delta or min(1e-5, 0.1 / n_records))
        training = replace(
            training,
            batch_size=min(n_records, training.batch_size or -(-n_records // 8)),
            learning_rate_end=training.learning_rate_end or training.learning_rate,
            decay_epochs=training.decay_epochs or training.epochs,
        )
        if training.bands == "auto":
            from tacit.experiments.training_loop import best_bands  # needs torch

            one = replace(recipe, training=replace(training, bands=1), privacy=privacy)
            bands = best_bands(one, n_records, also, parameters=parameters)
            training = replace(training, bands=bands)
        data = replace(recipe.data, is_public=recipe.data.holds_public_records)
        return replace(recipe, data=data, training=training, privacy=privacy)

    def to_dict(self) -> dict[str, Value]:
        """Return plain values by section, without empty values and sections the method ignores."""
        given = asdict(self, dict_factory=lambda items: {k: v for k, v in items if v not in _UNSET})
        unused = _UNUSED[self.method]
        return {name: v for name, v in given.items() if name not in unused and v != ()}

    def to_toml(self) -> str:
        """Return TOML text that `parse` reads back to an equal recipe.

        >>> Recipe.parse(Recipe().to_toml()) == Recipe()
        True
        """
        return tomli_w.dumps(self.to_dict())


def shipped() -> list[str]:
    """Return the names of the recipes that are part of the package."""
    return sorted(
        p.name.removesuffix(".toml") for p in SHIPPED.iterdir() if p.name.endswith("toml")
    )


def _with_method(data: Mapping[str, Value], default: str) -> dict[str, Value]:
    """Return `data` with its method named."""
    found = dict(data)
    is_pate = any(name in found for name in ("teachers", "answers"))
    found.setdefault("method", "pate" if is_pate else default)
    if not isinstance(found["method"], str):
        raise ValueError(f"method must be one of {', '.join(_UNUSED)}.")
    return found


def _interpolate(points: list[tuple[float, Value]], epsilon: float) -> Value:
    """Return the setting at `epsilon`, interpolated between pairs (epsilon, setting), sorted."""
    if epsilon <= points[0][0]:
        return points[0][1]
    for (low, first), (high, second) in pairwise(points):
        if epsilon <= high:
            if not all(type(v) in (int, float) and v > 0 for v in (first, second)):
                return second if epsilon == high else first
            share = math.log(epsilon / low) / math.log(high / low)
            value = first ** (1 - share) * second**share
            return round(value) if isinstance(first, int) and isinstance(second, int) else value
    return points[-1][1]

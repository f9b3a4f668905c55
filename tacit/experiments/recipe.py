"""Recipes: one TOML file says what is trained, on what, how, and at what price.

Every key has a default, so an empty file is a recipe; the run folder gets the file with all of them
written out. A wrong key is answered with what to write instead. `[[at]]` gives the settings for
several epsilons; between two of them they are interpolated (see `Recipe.for_epsilon`).

    [data]
    name = "mnist"
    [features]
    kind = "scattering"
    [privacy]
    epsilon = 3.0
"""

import math
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from tacit.experiments import _toml
from tacit.experiments.settings import (
    Data,
    Features,
    Model,
    Privacy,
    Published,
    Run,
    Training,
    Value,
    cast,
    section,
)

_ADJUSTED: dict[str, type] = {"features": Features, "training": Training}
SHIPPED = resources.files("tacit.experiments") / "recipes"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A checked recipe; `read`, `parse` and `shipped` make one.

    >>> Recipe.parse('[privacy]\\nepsilon = 1').privacy.epsilon
    1.0
    >>> Recipe.parse('[training]\\nepoch = 3')
    Traceback (most recent call last):
    ValueError: [training] has no 'epoch'. Did you mean 'epochs'?
    """

    name: str = "digits"
    data: Data = field(default_factory=Data)
    features: Features = field(default_factory=Features)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    privacy: Privacy = field(default_factory=Privacy)
    run: Run = field(default_factory=Run)
    at: tuple[dict[str, Value], ...] = ()
    """Settings of [features] and [training] for given epsilons."""
    published: tuple[Published, ...] = ()
    """What to compare with; changes nothing about a run."""

    def __post_init__(self) -> None:
        for given in self.at:
            if not isinstance(given.get("epsilon"), int | float) or given["epsilon"] <= 0:
                raise ValueError("each [[at]] needs the epsilon it is for, as in epsilon = 1.0.")
            for name, settings in given.items():
                if name in _ADJUSTED:
                    section(_ADJUSTED[name], settings, f"at.{name}")
                elif name != "epsilon":
                    raise ValueError(f"[[at]] has epsilon, features and training, not {name!r}.")

    @classmethod
    def parse(cls, text: str) -> "Recipe":
        """The recipe in TOML text."""
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as wrong:
            raise ValueError(f"the recipe is not TOML: {wrong}.") from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Value]) -> "Recipe":
        """The recipe in the form that TOML gives."""
        return section(cls, data, "")

    @classmethod
    def read(cls, name: str | Path) -> "Recipe":
        """The recipe in a file, or the shipped one of that name."""
        path = Path(name)
        if path.suffix == ".toml" or path.is_file():
            return cls.parse(path.read_text(encoding="utf-8"))
        if str(name) not in shipped():
            raise ValueError(
                f"{name} is neither a recipe file (.toml) nor a shipped recipe. "
                f"Shipped: {', '.join(shipped())}."
            )
        return cls.parse((SHIPPED / f"{name}.toml").read_text(encoding="utf-8"))

    def with_settings(self, settings: Mapping[str, Value]) -> "Recipe":
        """This recipe with `{"training.epochs": 20}` changed.

        >>> Recipe().with_settings({"training.epochs": 20}).training.epochs
        20.0
        """
        data = self.to_dict()
        for dotted, value in settings.items():
            *path, name = dotted.split(".")
            inner = data
            for part in path:
                inner = inner.setdefault(part, {})
                if not isinstance(inner, dict):
                    raise ValueError(f"{dotted} is not a setting of a recipe.")
            inner[name] = value
        return Recipe.from_dict(data)

    def for_epsilon(self, epsilon: float) -> "Recipe":
        """This recipe for one epsilon: `[[at]]` is resolved and gone.

        Numbers between two given epsilons are interpolated on logarithmic axes; outside, the
        nearest is used. The choice looks at no data.
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

    def filled(self, n_records: int) -> "Recipe":
        """This recipe for one run: no default left open. `n_records` is assumed public."""
        recipe = self.for_epsilon(self.privacy.epsilon)
        training, privacy = recipe.training, recipe.privacy
        return replace(
            recipe,
            data=replace(recipe.data, is_public=recipe.data.holds_public_records),
            training=replace(
                training,
                batch_size=min(n_records, training.batch_size or -(-n_records // 8)),
                learning_rate_end=training.learning_rate_end or training.learning_rate,
                decay_epochs=training.decay_epochs or training.epochs,
            ),
            privacy=replace(privacy, delta=privacy.delta or min(1e-5, 0.1 / n_records)),
        )

    def to_dict(self) -> dict[str, Value]:
        """Plain values by section; what is None or empty is left out."""
        return _plain(self)

    def to_toml(self) -> str:
        """TOML text that `parse` reads back to an equal recipe.

        >>> Recipe.parse(Recipe().to_toml()) == Recipe()
        True
        """
        return _toml.dumps(self.to_dict())


def shipped() -> list[str]:
    """Names of the recipes that come with tacit."""
    return sorted(
        p.name.removesuffix(".toml") for p in SHIPPED.iterdir() if p.name.endswith("toml")
    )


def _interpolate(points: list[tuple[float, Value]], epsilon: float) -> Value:
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


def _plain(value: Value) -> Value:
    if hasattr(value, "__dataclass_fields__"):
        inner = {f.name: getattr(value, f.name) for f in fields(value)}
        return {n: _plain(item) for n, item in inner.items() if item not in (None, (), {})}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return value

"""A DP-SGD recipe as a scikit-learn classifier, for searches over its settings."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit.accounting import GDP, calibrate, gdp_mu_squared
from tacit.datasets import Dataset
from tacit.events import Event, Gaussian, Relation, Sequence
from tacit.experiments import models
from tacit.experiments.features import PaidSummary, Prepared, cache_folder, prepare
from tacit.experiments.recipe import Recipe
from tacit.experiments.released import Released
from tacit.experiments.training_loop import (
    TrainingLoop,
    features_events,
    noise_multiplier,
    tensors,
    training_event,
)
from tacit.ledger import Ledger
from tacit.training import Key

_MOST_FEATURES = 0.5  # share of the squared budget that paid features may take


class PlannedRecipe(NamedTuple):
    """A recipe with all defaults filled in, its noise multiplier and its event."""

    recipe: Recipe
    noise: float
    event: Event


_TABLES = ("features", "model", "training")  # of a recipe, whose settings may differ between runs


@dataclass(eq=False)
class RecipeClassifier:
    """The model of a recipe, trained by DP-SGD on the records given to `fit`.

    Guarantee: the fitted model is (`epsilon`, `delta`)-DP. Paid features and all steps are one
    event, paid from `ledger` before anything is released.

    Parameters
    ----------
    recipe
        A recipe of method dp-sgd. Its budget and its data section are not used.
    settings
        Settings of the recipe to change, by names such as "training.learning_rate". `set_params`
        takes these names too.
    n_records, classes
        Public number of records, and the list of all classes.
    cache
        Folder for features that take long to compute; it holds private values.
    reference
        (epsilon, delta) of the run for which the learning rate is meant, if this one is a trial
        with more noise. The learning rate is then lowered so that its product with the noise, which
        is what a step adds to the weights, stays the same. None: the rate is used as it is.
    """

    recipe: Recipe
    settings: Mapping[str, Any] = field(default_factory=dict)  # Any: values of settings
    epsilon: float = 1.0
    delta: float = 1e-6
    n_records: int | None = None
    classes: ArrayLike | None = None
    relation: str = "add_remove"
    ledger: Ledger | None = None
    random_state: int | None = None
    cache: Path | None = None
    reference: tuple[float, float] | None = None

    def fit(self, X: NDArray[Any], y: ArrayLike) -> Self:
        """Train on private records `X` (n, ...) with labels `y`; pay before any release."""
        if self.ledger is not None:
            self.ledger.require_unit(is_user=False)
        labels = np.asarray(y)
        self.classes_ = np.unique(labels if self.classes is None else np.asarray(self.classes))
        n_records = len(labels) if self.n_records is None else self.n_records
        recipe, noise, event = self.planned(n_records)
        key = Key.from_seed(self.random_state)
        if self.ledger is not None:
            self.ledger.spend(event, note=f"{recipe.name}, DP-SGD")
        numbers = np.searchsorted(self.classes_, labels).astype(np.int64)
        prepared = self._prepare(recipe, np.asarray(X), numbers, key)
        init = int.from_bytes(hashlib.sha256(b"init" + key.secret).digest()[:4])
        loop = TrainingLoop(
            recipe,
            models.build(recipe.model, prepared.shape, len(self.classes_), seed=init),
            tensors(prepared.x_train, prepared.y_train),
            n_records=n_records,
            noise_multiplier=noise,
            also=features_events(recipe, n_records),
            seed=self.random_state,
        )
        assert loop.private.event == event  # what was paid is what is trained
        for _ in loop.steps():
            pass
        with loop.released() as model:
            weights = {n: value.cpu().numpy().copy() for n, value in model.state_dict().items()}
        self.weights_ = weights
        self.released_ = self._released(recipe, prepared)
        self.event_ = event
        return self

    def predict(self, X: NDArray[Any]) -> NDArray[Any]:
        """Return the most probable class of each record."""
        return self.classes_[self.released_.predict(np.asarray(X))]

    def score(self, X: NDArray[Any], y: ArrayLike) -> float:
        """Return the share of records whose class is predicted correctly."""
        return float(np.mean(self.predict(X) == np.asarray(y)))

    def planned(self, n_records: int) -> PlannedRecipe:
        """Return what `fit` trains on `n_records` records: recipe, noise multiplier and event."""
        recipe = _varied(self.recipe.for_epsilon(self.epsilon), self.settings)
        if recipe.training.shrink > 1:
            raise ValueError("training.shrink must be 1 here: such a run exceeds its budget.")
        privacy = replace(
            recipe.privacy, epsilon=self.epsilon, delta=self.delta, relation=str(self.relation)
        )
        recipe = _with_affordable_features(
            replace(recipe, privacy=privacy).filled(n_records), n_records
        )
        noise = noise_multiplier(recipe, n_records)
        steps = training_event(recipe, n_records, noise, lot=recipe.training.lot)
        paid = features_events(recipe, n_records)
        if self.reference is not None:
            recipe = self._with_rate_for(noise, recipe, n_records)
        return PlannedRecipe(recipe, noise, Sequence((*paid, steps)) if paid else steps)

    def _with_rate_for(self, noise: float, recipe: Recipe, n_records: int) -> Recipe:
        """Return `recipe` with the learning rate that goes with `noise`; see `reference`."""
        assert self.reference is not None
        epsilon, delta = self.reference
        meant = replace(self, epsilon=epsilon, delta=delta, reference=None).planned(n_records)
        factor, training = meant.noise / noise, recipe.training
        end = training.learning_rate_end
        scaled = replace(
            training,
            learning_rate=factor * training.learning_rate,
            learning_rate_end=None if end is None else factor * end,
        )
        return replace(recipe, training=scaled)

    def get_params(self, deep: bool = True) -> dict[str, Any]:  # noqa: ARG002  # scikit-learn's
        """Return the settings by name, as scikit-learn expects."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def set_params(self, **params: Any) -> Self:
        """Change settings by name; names with a dot are those of the recipe."""
        known = self.get_params()
        for name, value in params.items():
            if "." in name:
                _varied(self.recipe, {name: value})  # raises if there is no such setting
                self.settings = {**self.settings, name: value}
            elif name in known:
                setattr(self, name, value)
            else:
                raise ValueError(f"a recipe has no setting {name!r}.")
        return self

    def _prepare(
        self, recipe: Recipe, x: NDArray[Any], numbers: NDArray[np.int64], key: Key
    ) -> Prepared:
        """Return the records as the model sees them; paid summaries are released here."""

        def release(name: str, summary: PaidSummary, rows: NDArray[Any]) -> NDArray[Any]:
            return summary.release(rows, key.numpy(name, 0))

        dataset = Dataset(recipe.name, x, numbers, x[:0], numbers[:0], len(self.classes_))
        return prepare(
            dataset, recipe.features, release=release, cache=self.cache or cache_folder()
        )

    def _released(self, recipe: Recipe, prepared: Prepared) -> Released:
        import torch

        model = models.build(recipe.model, prepared.shape, len(self.classes_), seed=0)
        model.load_state_dict({n: torch.from_numpy(v) for n, v in self.weights_.items()})
        return Released(recipe, model.eval(), prepared.summaries)


def _varied(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """Return `recipe` with these settings; data, budget and seed are those of the estimator."""
    fixed = sorted(name for name in settings if name.partition(".")[0] not in _TABLES)
    varied = recipe.with_settings(settings)
    if fixed:
        raise ValueError(
            f"{', '.join(fixed)} cannot be varied: the estimator has its own data, budget and "
            f"seed. Vary settings of {', '.join(_TABLES)}."
        )
    return varied


def _with_affordable_features(recipe: Recipe, n_records: int) -> Recipe:
    """Return `recipe`, with more noise in paid features that would take most of a small budget.

    A search makes trials on small budgets. Features may take half of the squared budget, mu squared
    of a Gaussian release; above that, all of their noise multipliers grow by one factor.
    """
    budget, relation = recipe.privacy.budget, Relation(recipe.privacy.relation)
    paid = sum(gdp_mu_squared(event, relation) for event in features_events(recipe, n_records))
    noise = calibrate(
        Gaussian, epsilon=budget.epsilon, delta=budget.delta, relation=relation, accountant=GDP()
    )
    factor = math.sqrt(paid / _MOST_FEATURES * noise**2)
    if factor <= 1:
        return recipe
    noises = ("even_noise_multiplier", "noise_multiplier", "mean_noise_multiplier")
    raised = {name: factor * getattr(recipe.features, name) for name in noises}
    return replace(recipe, features=replace(recipe.features, **raised))

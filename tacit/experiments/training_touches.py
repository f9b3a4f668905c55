"""How a training run touches the private data, and what it releases, in words for its facts."""

from collections.abc import Iterator, Mapping
from typing import Any

from tacit.datasets import Dataset
from tacit.experiments.facts import Touch
from tacit.experiments.features import summaries_of
from tacit.experiments.recipe import Recipe
from tacit.experiments.table_check import table_releases

_SUMMARIES = {
    "directions": "principal directions of the records",
    "mean": "the mean record",
    "evening": "a map that evens out the main directions of the records",
}


def touches(
    recipe: Recipe, dataset: Dataset, info: Mapping[str, Any], *, has_baseline: bool
) -> Iterator[Touch]:  # Any: numbers and lists of them
    """Yield a description of every use that the run makes of the data; `info` is of its steps."""
    features = recipe.features
    by_record = {
        "none": "values scaled by declared bounds, record by record",
        "scattering": "fixed wavelets and statistics of one image at a time",
        "pca": f"projected on {features.components} principal directions",
        "projection": f"{features.components} random directions from a public seed",
    }
    yield Touch(what="size", how="the number of training records is assumed public", cost="public")
    yield Touch(what="preprocessing", how=by_record[features.kind], cost="free")
    for name, summary in summaries_of(features, dataset.n_records).items():
        how = f"{_SUMMARIES[name]}, released once with {summary.event}"
        yield Touch(what="preprocessing", how=how, cost="paid", event=summary.event.to_dict())
    yield from step_touches("the recipe", info)
    if recipe.data.validation_share:
        how = "records held out of the training set, measured on without noise"
        yield Touch(what="evaluation", how=how, cost="not covered")
    elif dataset.is_test_public:
        how = f"on {dataset.n_held_out:,} records of the test split"
        yield Touch(what="evaluation", how=how, cost="public")
    if has_baseline:
        how = "a twin trained without noise, since the recipe says that the records are public"
        yield Touch(what="baseline", how=how, cost="not covered")


def step_touches(settings_of: str, info: Mapping[str, Any]) -> Iterator[Touch]:  # Any: as above
    """Yield how noisy steps use the data; their settings are those of `settings_of`."""
    how = "noisy sums of clipped gradients; the plan was paid before its first step"
    if reserve := info.get("reserve"):
        how += f": {info['steps']:,} steps, and {reserve:,} reserved for those that a crash loses"
    yield Touch(what="training", how=how, cost="paid")
    for repaid in info.get("repaid", ()):
        how = f"steps that were lost at a restart and taken again beyond the reserve: {repaid}"
        yield Touch(what="training", how=how, cost="paid")
    for reason in info.get("public_changes", ()):
        how = f"weights changed beside the run, declared public: {reason}"
        yield Touch(what="training", how=how, cost="public")
    how = (
        f"none in this run: settings are those of {settings_of}; if they were chosen by looking at "
        "these records, that is not in the bill"
    )
    yield Touch(what="model selection", how=how, cost="public")
    yield Touch(what="early stopping", how="none: the number of steps was fixed", cost="public")


def releases(recipe: Recipe, dataset: Dataset) -> tuple[str, ...]:
    """Return in words what the run releases."""
    training, weights = recipe.training, "final weights"
    if training.average:
        is_tail = training.correlated > 1  # then the run averages the weights by itself
        weights = f"{'mean of the last' if is_tail else 'running mean of the'} weights"
    taken = [_SUMMARIES[name] for name in summaries_of(recipe.features, 1)]
    held = recipe.data.validation_share
    measured = "records held out of the training set" if held else "the test split"
    metrics = [f"metrics on {measured} after each epoch"] if dataset.is_test_public else []
    if training.loss_upper is not None:
        metrics.append(f"the mean training loss of each step, clipped to {training.loss_upper:g}")
    return (weights, *taken, *metrics, *table_releases(recipe.data, dataset))

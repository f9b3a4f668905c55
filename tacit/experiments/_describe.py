"""The facts of a run: what it did, said in full."""

import hashlib
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import tacit
from tacit import accounting
from tacit.datasets import Dataset
from tacit.events import Event, Relation
from tacit.experiments.evaluate import majority_accuracy
from tacit.experiments.features import summaries_of
from tacit.experiments.plan import lot_of
from tacit.experiments.recipe import Recipe
from tacit.experiments.run import (
    BASELINE,
    MODEL,
    RECIPE,
    Facts,
    Metric,
    RunFolder,
    SeedValue,
    Touch,
    Utility,
)
from tacit.ledger import Ledger

_SUMMARIES = {
    "directions": "principal directions of the records",
    "mean": "the mean record",
    "evening": "a map that evens out the main directions of the records",
}


def describe_run(
    recipe: Recipe,
    folder: RunFolder,
    dataset: Dataset,
    ledger: Ledger,
    *,
    claim: Event,
    noise_multiplier: float,
    steps: int,
    model: str,
    metrics: Sequence[Metric],
    baseline: Sequence[Metric],
    resumed: int,
    seconds: float,
) -> Facts:
    """The facts, once everything but facts.json is in the folder."""
    privacy = recipe.privacy
    assert privacy.delta is not None  # filled
    relation = Relation(privacy.relation)
    n = len(dataset.x_train)
    seed = recipe.run.seed
    bracket = accounting.bracket(claim, delta=privacy.delta, relation=relation)
    sampling = f"Poisson, rate {lot_of(recipe) / n:.6g}, drawn anew for each step"
    return Facts(
        event=claim.to_dict(),
        relation=str(relation),
        unit=ledger.unit,
        delta=privacy.delta,
        epsilon=bracket.upper,
        epsilon_target=privacy.epsilon,
        data=dataset.name,
        n_records=n,
        assumed_public=(*dataset.public, "the records measured on"),
        sampling_assumed=sampling,
        sampling_used=sampling,
        touches=_touches(recipe, dataset, has_baseline=bool(baseline)),
        released=_released(recipe),
        seed="OS entropy" if seed is None else seed,
        method="DP-SGD",
        model=model,
        hyperparameters=_hyperparameters(recipe, steps, noise_multiplier),
        steps=steps,
        resumed=resumed,
        utility=_utility(recipe, dataset, metrics, baseline),
        model_sha256=_sha256(folder, MODEL),
        recipe_sha256=_sha256(folder, RECIPE),
        baseline_file=BASELINE if baseline else None,
        ledger_file=privacy.ledger or Facts.ledger_file,
        ledger_head=ledger.verify().head,
        seconds=round(seconds, 3),
        versions=_versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _touches(recipe: Recipe, dataset: Dataset, *, has_baseline: bool) -> tuple[Touch, ...]:
    """Every look at the data."""
    features, measured = recipe.features, f"{len(dataset.x_test):,} records of the test split"
    how = {
        "none": "values scaled by declared bounds, record by record",
        "scattering": "fixed wavelets and statistics of one image at a time",
        "pca": f"projected on {features.components} principal directions",
        "projection": f"{features.components} random directions from a public seed",
    }[features.kind]
    touches = [
        Touch(what="size", how="the number of training records is assumed public", cost="public"),
        Touch(what="preprocessing", how=how, cost="free"),
    ]
    for name, summary in summaries_of(features, len(dataset.x_train)).items():
        how = f"{_SUMMARIES[name]}, released once with {summary.event}"
        event = summary.event.to_dict()
        touches.append(Touch(what="preprocessing", how=how, cost="paid", event=event))
    touches += [
        Touch(
            what="training",
            how="noisy sums of clipped gradients; the plan was paid before its first step",
            cost="paid",
        ),
        Touch(
            what="model selection",
            how="none in this run: settings are those of the recipe; if they were chosen by "
            "looking at these records, that is not in the bill",
            cost="public",
        ),
        Touch(what="early stopping", how="none: the number of steps was fixed", cost="public"),
    ]
    if recipe.data.validation_share:
        how = "records held out of the training set, measured on without noise"
        touches.append(Touch(what="evaluation", how=how, cost="not covered"))
    else:
        touches.append(Touch(what="evaluation", how=f"on {measured}", cost="public"))
    if has_baseline:
        how = "a twin trained without noise, since the recipe says that the records are public"
        touches.append(Touch(what="baseline", how=how, cost="not covered"))
    return tuple(touches)


def _released(recipe: Recipe) -> tuple[str, ...]:
    weights = "running mean of the weights" if recipe.training.average else "final weights"
    taken = [_SUMMARIES[name] for name in summaries_of(recipe.features, 1)]
    held = recipe.data.validation_share
    measured = "records held out of the training set" if held else "the test split"
    return (weights, *taken, f"metrics on {measured} after each epoch")


def _hyperparameters(recipe: Recipe, steps: int, noise_multiplier: float) -> dict[str, object]:
    training = recipe.to_dict()["training"]
    return training | {"steps": steps, "noise_multiplier": noise_multiplier}


def _utility(
    recipe: Recipe, dataset: Dataset, metrics: Sequence[Metric], baseline: Sequence[Metric]
) -> Utility:
    seed, last = recipe.run.seed, metrics[-1]
    twin = (SeedValue(seed=seed, value=baseline[-1]["accuracy"]),) if baseline else ()
    others = {name: last[name] for name in ("loss", "auc") if name in last}
    if baseline:
        others |= {f"baseline_{n}": baseline[-1][n] for n in ("loss", "auc") if n in baseline[-1]}
    return Utility(
        metric="accuracy",
        private=(SeedValue(seed=seed, value=last["accuracy"]),),
        non_private=twin,
        majority=majority_accuracy(dataset.y_test),
        others=others,
        n_test=len(dataset.x_test),
    )


def _sha256(folder: RunFolder, name: str) -> str:
    return hashlib.sha256((folder / name).read_bytes()).hexdigest()


def _versions() -> dict[str, str]:
    found = {"tacit": tacit.__version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "scipy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # installed without its metadata
            continue
    return found

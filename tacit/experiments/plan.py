"""What a filled recipe will do to the private records, as an event, and the noise it needs."""

from dataclasses import replace

from tacit import accounting
from tacit.events import Event, Gaussian, Relation, Repeated, Sequence
from tacit.experiments.features import summaries_of
from tacit.experiments.recipe import Recipe
from tacit.sampling import Poisson


def steps_of(recipe: Recipe, n_records: int) -> int:
    """Number of releases of the training."""
    from tacit.training import count_steps

    batch = recipe.training.batch_size
    assert batch is not None  # filled
    epochs = recipe.training.epochs
    return count_steps(epochs=epochs, steps=None, batch_size=batch, n_records=n_records)


def lot_of(recipe: Recipe) -> int:
    """Expected number of records in one step."""
    batch = recipe.training.batch_size
    assert batch is not None  # filled
    return max(1, batch // recipe.training.shrink)


def learning_rate(recipe: Recipe, n_records: int, step: int) -> float:
    """Learning rate of a step: linear from start to end over `decay_epochs`, then constant."""
    training = recipe.training
    assert training.batch_size is not None  # filled, like the next two
    assert training.decay_epochs is not None
    assert training.learning_rate_end is not None
    epoch = step * training.batch_size / n_records
    share = min(1.0, epoch / training.decay_epochs)
    start, end = training.learning_rate, training.learning_rate_end
    return start + share * (end - start)


def claim(
    recipe: Recipe, n_records: int, noise_multiplier: float, *, steps: int | None = None
) -> Event:
    """The features' release, if they have one, then `steps` steps (default all)."""
    step = Poisson(lot_of(recipe) / n_records).amplify(Gaussian(noise_multiplier))
    training = Repeated(step, steps_of(recipe, n_records) if steps is None else steps)
    paid = features_events(recipe, n_records)
    return Sequence((*paid, training)) if paid else training


def features_events(recipe: Recipe, n_records: int) -> tuple[Event, ...]:
    """What the features do to the private records; empty if each record is mapped by itself."""
    return tuple(s.event for s in summaries_of(recipe.features, n_records).values())


def noise_multiplier(recipe: Recipe, n_records: int) -> float:
    """The least noise of the training with which everything stays within the recipe's epsilon.

    With `training.shrink`, that noise divided by it: not within the epsilon.
    """
    privacy, training = recipe.privacy, recipe.training
    assert privacy.delta is not None
    whole = replace(recipe, training=replace(training, shrink=1))
    try:
        noise = accounting.calibrate(
            lambda noise: claim(whole, n_records, noise),
            epsilon=privacy.epsilon,
            delta=privacy.delta,
            relation=Relation(privacy.relation),
        )
        return noise / training.shrink
    except ValueError as refusal:
        paid = features_events(recipe, n_records)
        if not paid:
            raise
        listed = "; ".join(str(event) for event in paid)
        raise ValueError(
            f"{refusal} The features alone are {listed}: raise their noise_multiplier."
        ) from None

"""`tacit calibrate`: the noise, the rate or the number of steps for a budget."""

import typer

from tacit import events as ev
from tacit.cli import _shared as shared

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def calibrate(
    *,
    epsilon: shared.Epsilon,
    delta: shared.Delta,
    rate: shared.MaybeRate = None,
    noise_multiplier: shared.MaybeNoise = None,
    steps: shared.MaybeSteps = None,
    relation: shared.Relation = ev.Relation.ADD_REMOVE,
    as_json: shared.AsJson = False,
) -> None:
    """Find the least noise, the largest rate or the most steps with at most EPSILON at DELTA.

    Give two of --rate, --noise-multiplier and --steps. The third is computed, and rounded so that
    the budget still holds.

    \b
    Example:
      tacit calibrate --epsilon 3 --delta 1e-5 --rate 0.01 --steps 10000
      tacit calibrate --epsilon 3 --delta 1e-5 --rate 0.01 --noise-multiplier 1.1
    """
    from tacit import accounting

    budget = {"epsilon": epsilon, "delta": delta, "relation": relation}
    match rate, noise_multiplier, steps:
        case float(), None, int():
            name, shown = "noise_multiplier", shared.round_up
            found = accounting.calibrate(lambda noise: shared.sgd(rate, noise, steps), **budget)
            event = shared.sgd(rate, found, steps)
        case None, float(), int():
            name, shown = "rate", shared.round_down
            found = accounting.calibrate(
                lambda rate: shared.sgd(rate, noise_multiplier, steps),
                bounds=(1e-12, 1.0),
                **budget,
            )
            event = shared.sgd(found, noise_multiplier, steps)
        case float(), float(), None:
            name, shown = "steps", str
            found = accounting.calibrate_count(
                lambda steps: shared.sgd(rate, noise_multiplier, steps), **budget
            )
            event = shared.sgd(rate, noise_multiplier, found)
        case _:
            raise ValueError("give exactly two of --rate, --noise-multiplier and --steps.")
    reached = accounting.epsilon(event, delta=delta, relation=relation)
    if as_json:
        settings = budget | {"relation": str(relation), "event": event.to_dict()}
        shared.print_json({name: found, "epsilon_reached": reached} | settings)
        return
    typer.echo(f"{name.replace('_', ' ')} = {shown(found)}")
    typer.echo(f"costs epsilon {shared.round_up(reached, 8)} at delta = {delta:g}, {relation}")
    typer.echo(f"for {event}")

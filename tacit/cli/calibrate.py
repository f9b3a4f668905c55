"""`tacit calibrate`: the noise, the rate or the number of steps for a budget."""

from typing import Any

import typer

from tacit import events as ev
from tacit.cli import _shared as shared


def calibrate(
    *,
    epsilon: shared.Epsilon,
    delta: shared.Delta,
    rate: shared.MaybeRate = None,
    noise_multiplier: shared.MaybeNoise = None,
    steps: shared.MaybeSteps = None,
    records: shared.MaybeRecords = None,
    batch_size: shared.MaybeBatch = None,
    epochs: shared.MaybeEpochs = None,
    relation: shared.Relation = ev.Relation.ADD_REMOVE,
    as_json: shared.AsJson = False,
) -> None:
    """Find the least noise, the largest rate or the most steps with at most EPSILON at DELTA.

    Give two of --rate, --noise-multiplier and --steps. The third is computed, and rounded so that
    the budget still holds. --records with --batch-size stands for --rate, and with --epochs also
    for --steps.

    \b
    Example:
      tacit calibrate --epsilon 3 --delta 1e-5 --rate 0.01 --steps 10000
      tacit calibrate --epsilon 3 --delta 1e-5 --rate 0.01 --noise-multiplier 1.1
      tacit calibrate --epsilon 3 --delta 1e-5 --records 60000 --batch-size 600 --epochs 20
    """
    from tacit import accounting

    sizes: dict[str, Any] = {"records": records, "batch_size": batch_size, "epochs": epochs}
    rate, steps = shared.rate_and_steps(rate, steps, **sizes)
    given: dict[str, Any] = {"rate": rate, "noise_multiplier": noise_multiplier, "steps": steps}
    absent = [name for name, value in given.items() if value is None]
    if len(absent) != 1:
        raise ValueError("give exactly two of --rate, --noise-multiplier and --steps.")
    (name,) = absent

    def run(value: Any) -> ev.Event:  # Any: a float, or an int if steps are asked for
        return shared.sgd(**(given | {name: value}))

    budget: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "relation": relation}
    if name == "noise_multiplier":
        found, shown = accounting.calibrate(run, **budget), shared.round_up
    elif name == "rate":
        found, shown = accounting.calibrate(run, bounds=(1e-12, 1.0), **budget), shared.round_down
    else:
        found, shown = accounting.calibrate_count(run, **budget), str
    event = run(found)
    reached = accounting.epsilon(event, delta=delta, relation=relation)
    if as_json:
        settings = budget | {"relation": str(relation), "event": event.to_dict()}
        shared.print_json({name: found, "epsilon_reached": reached} | settings)
        return
    typer.echo(f"{name.replace('_', ' ')} = {shown(found)}")
    typer.echo(f"costs epsilon {shared.round_up(reached, 8)} at delta = {delta:g}, {relation}")
    typer.echo(f"for {event}")

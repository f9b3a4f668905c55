"""`tacit curve`: epsilon against steps or delta, as a plot."""

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tacit import events as ev
from tacit.cli import _shared as shared


class Over(StrEnum):
    """The quantity on the horizontal axis of the curve."""

    STEPS = "steps"
    DELTA = "delta"


def curve(
    *,
    rate: shared.Rate,
    noise_multiplier: shared.NoiseMultiplier,
    steps: shared.Steps,
    delta: shared.Delta = 1e-5,
    over: Annotated[Over, typer.Option(help="The horizontal axis.")] = Over.STEPS,
    points: Annotated[int, typer.Option(min=2, max=1000, help="Number of points.")] = 33,
    relation: shared.Relation = ev.Relation.ADD_REMOVE,
    out: Annotated[
        Path | None, typer.Option(help="Also draw the curve into this .svg file; data as .csv.")
    ] = None,
    as_json: shared.AsJson = False,
) -> None:
    """Plot a certified upper bound on epsilon against the number of steps or against delta.

    Over steps, the curve ends at STEPS steps, all at DELTA. Over delta, it starts at a tenth of
    DELTA and ends at 0.1, all at STEPS steps.

    \b
    Example:
      tacit curve --rate 0.01 --noise-multiplier 4 --steps 10000 --over steps --out curve.svg
    """
    import tacit
    from tacit.report import Figure, Series, to_csv, to_svg_file, to_text

    if out is not None and out.suffix.lower() != ".svg":
        raise ValueError(f"out must end in .svg, got {out.name}.")
    xs = _grid(over, steps, delta, points)
    if over is Over.STEPS:
        runs = [(shared.sgd(rate, noise_multiplier, int(x)), delta) for x in xs]
    else:
        runs = [(shared.sgd(rate, noise_multiplier, steps), x) for x in xs]
    ys = [tacit.epsilon(event, delta=at, relation=relation) for event, at in runs]
    fixed = f"delta = {delta:g}" if over is Over.STEPS else f"{steps:,} steps"
    title = f"rate {rate:g}, noise multiplier {noise_multiplier:g}, {fixed}, {relation}"
    if as_json:
        shared.print_json({"over": str(over), "x": xs, "epsilon": ys, "setting": title})
    elif not all(math.isfinite(y) for y in ys):
        raise ValueError("epsilon is infinite on part of this range, so there is no curve to draw.")
    figure = Figure(
        name=f"epsilon-by-{over}",
        title=title,
        caption="",
        x_label=str(over),
        y_label="epsilon",
        x_log=over is Over.DELTA,
        series=(Series(name="epsilon", x=tuple(xs), y=tuple(ys)),),
    )
    if out is not None:
        out.write_text(to_svg_file(figure), encoding="utf-8")
        out.with_suffix(".csv").write_text(to_csv(figure), encoding="utf-8")
    if as_json:
        return
    typer.echo(f"epsilon against {over}: {title}\n")
    typer.echo(to_text(figure))
    if out is not None:
        typer.echo(f"\nwrote {out}")


def _grid(over: Over, steps: int, delta: float, points: int) -> list[float]:
    import numpy as np

    from tacit._check import in_open_unit, whole

    whole(steps=steps, least=1)
    in_open_unit(delta=delta)
    if over is Over.STEPS:
        return [float(x) for x in np.unique(np.rint(np.linspace(1, steps, points)))]
    return [float(x) for x in np.geomspace(min(delta, 0.1) / 10, 0.1, points)]

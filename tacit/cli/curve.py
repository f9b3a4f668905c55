"""`tacit curve`: epsilon against steps or delta."""

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tacit import events as ev
from tacit.cli import _shared as shared

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class Over(StrEnum):
    """What varies along the horizontal axis."""

    STEPS = "steps"
    DELTA = "delta"


@app.command()
def curve(
    *,
    rate: shared.Rate,
    noise_multiplier: shared.NoiseMultiplier,
    steps: shared.Steps,
    delta: shared.Delta = 1e-5,
    over: Annotated[Over, typer.Option(help="What varies.")] = Over.STEPS,
    points: Annotated[int, typer.Option(min=2, max=1000, help="Number of points.")] = 33,
    relation: shared.Relation = ev.Relation.ADD_REMOVE,
    out: Annotated[Path | None, typer.Option(help="Also draw it to a .png, .svg or .pdf.")] = None,
    as_json: shared.AsJson = False,
) -> None:
    """Epsilon (certified upper bound) up to STEPS steps at DELTA, or at STEPS steps down to DELTA.

    \b
    Example:
      tacit curve --rate 0.01 --noise-multiplier 4 --steps 10000 --over steps --out curve.svg
    """
    if out is not None and out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"out must end in .png, .svg or .pdf, got {out.name}.")
    xs = _grid(over, steps, delta, points)
    ys = [
        _epsilon(
            shared.sgd(rate, noise_multiplier, int(x) if over is Over.STEPS else steps),
            delta if over is Over.STEPS else x,
            relation,
        )
        for x in xs
    ]
    fixed = f"delta = {delta:g}" if over is Over.STEPS else f"{steps:,} steps"
    title = f"rate {rate:g}, noise multiplier {noise_multiplier:g}, {fixed}, {relation}"
    if as_json:
        shared.print_json({"over": str(over), "x": xs, "epsilon": ys, "setting": title})
    elif not all(math.isfinite(y) for y in ys):
        raise ValueError("epsilon is infinite on part of this range, so there is no curve to draw.")
    if out is not None:
        _save(out, xs, ys, over, title)
    if as_json:
        return
    from tacit.cli._plot import draw

    typer.echo(f"epsilon against {over}: {title}\n")
    typer.echo(draw(xs, ys, log_x=over is Over.DELTA))
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


def _epsilon(event: ev.Event, delta: float, relation: ev.Relation) -> float:
    import tacit

    return tacit.epsilon(event, delta=delta, relation=relation)


def _save(out: Path, xs: list[float], ys: list[float], over: Over, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.plot(xs, ys, linewidth=2)
    axes.set(xlabel=str(over), ylabel="epsilon", title=title)
    axes.title.set_fontsize(9)
    if over is Over.DELTA:
        axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(out, dpi=150)

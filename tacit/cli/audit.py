"""`tacit audit RUN/`: attack a finished run; a lower bound above its bill is proof of a fault.

Exit codes: 0 the bill stands; 1 a lower bound passes it, or its curve is refuted; 2 anything else.
"""

from pathlib import Path
from typing import Annotated

import typer

from tacit.cli import _run as run
from tacit.cli import _shared as shared

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def audit(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    *,
    canaries: Annotated[int, typer.Option(min=2, help="How many.")] = 10_000,
    confidence: Annotated[float, typer.Option(help="That a right bill stands.")] = 0.95,
    data: run.Root = None,
    seed: run.Seed = None,
    page: run.WithPage = True,
    as_json: shared.AsJson = False,
) -> None:
    """Train by the run's recipe again with canaries, attack every release, write audit.json.

    A PATE run is attacked through its answers: can one vote be seen through the noise?

    Example: tacit audit runs/digits-epsilon-3
    """
    from tacit.experiments import audit_run

    found = audit_run(folder, n_canaries=canaries, confidence=confidence, root=data, seed=seed)
    if page:
        run.write_page(folder)
    if as_json:
        shared.print_json(found.to_dict())
    else:
        claimed, attacked = shared.round_up(found.claimed), shared.round_up(found.epsilon)
        typer.echo(
            f"bill: epsilon {claimed} at delta {found.delta:g}; what is attacked: {attacked}"
        )
        for bound in found.bounds:
            typer.echo(f"at least {bound.epsilon_lower:.3f} by {bound.method} ({bound.assumes})")
        if found.accuracy is not None:
            with_canaries, without = found.accuracy["with_canaries"], found.accuracy["without"]
            typer.echo(f"accuracy {with_canaries:.2%} with canaries, {without:.2%} without")
    if not found.passes:
        typer.secho("the bill is refuted: something is broken.", fg="red", err=True)
        raise typer.Exit(1)
    if not as_json:
        typer.secho(f"the bill stands at {100 * confidence:g} % confidence.", fg="green")

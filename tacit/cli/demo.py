"""`tacit demo`: train on data that needs no network, and write the page."""

from pathlib import Path
from typing import Annotated

import typer

from tacit.cli import _shared as shared


def demo(
    *,
    epsilon: Annotated[float, typer.Option(help="Largest epsilon allowed.")] = 3.0,
    out: shared.Out = None,
    page: shared.WithPage = True,
    as_json: shared.AsJson = False,
) -> None:
    """Train a classifier of handwritten digits privately, in less than a minute.

    \b
    Example:
      tacit demo --epsilon 1
    """
    from tacit.experiments import RunFolder

    folder, number = out or Path("runs") / "demo", 1
    while out is None and RunFolder(folder).is_finished:  # demo, demo-2, demo-3, ...
        number += 1
        folder = folder.with_name(f"demo-{number}")
    recipe = shared.recipe_of("digits", None, privacy__epsilon=epsilon)
    shared.train_and_print(recipe, folder, page=page, as_json=as_json)
    if not as_json:
        typer.echo(f"attack it: tacit audit {folder}")

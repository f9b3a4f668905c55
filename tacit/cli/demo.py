"""`tacit demo`: train on data that needs no network, and write the page."""

from pathlib import Path

import typer

from tacit.cli import _run as run
from tacit.cli import _shared as shared

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def demo(
    *,
    epsilon: float = 3.0,
    out: run.Out = None,
    page: run.WithPage = True,
    as_json: shared.AsJson = False,
) -> None:
    """Learn handwritten digits under differential privacy, in less than a minute.

    \b
    Example:
      tacit demo --epsilon 1
    """
    from tacit.experiments import train

    recipe = run.recipe_of("digits", None, privacy__epsilon=epsilon)
    folder = out or run.free_folder(Path("runs") / "demo")
    with run.resumable(folder), run.progress_bar("digits", is_hidden=as_json) as show:
        facts = train(recipe, folder, on_progress=show)
    written = run.write_page(folder) if page else None
    if as_json:
        shared.print_json(run.outcome(facts, folder, written))
    else:
        run.print_outcome(facts, folder, written)

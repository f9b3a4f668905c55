"""`tacit surface`: the likelihood surface of a logit model, and the paths of DP-SGD on it."""

from pathlib import Path
from typing import Annotated

import typer

from tacit.cli import _shared as shared
from tacit.cli import _tables as tables
from tacit.cli._options import expanded


@expanded
def surface(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="A recipe file, a built-in recipe, or a table."),
    ] = "pums-married",
    *,
    epsilons: shared.Epsilons = "0.03,0.1,0.3,1",
    repeats: shared.Repeats = 5,
    given: tables.RecipeOptions,
) -> None:
    """Draw the log-likelihood of a logit model with one attribute, and DP-SGD's paths on it.

    The data must be public, because the surface is computed without noise. Writes report.html,
    study.json, and three figures with their data as CSV: the surface, the fitted curve, and the
    loss against epsilon.

    \b
    Example:
      tacit surface pums-married --data DATA
      tacit surface survey.csv --schema one-attribute.toml --public
    """
    from tacit.experiments import study_logit
    from tacit.report import write_logit_report

    wanted = shared.numbers(epsilons, "--epsilons")
    if not wanted:
        raise typer.BadParameter("--epsilons must name at least one budget.")
    is_table = given.schema is not None or tables.is_table(recipe)
    chosen = given.recipe(recipe, epsilon=max(wanted) if is_table else None)
    with shared.progress_bar("DP-SGD", is_hidden=given.as_json) as show:

        def on_run(done: int, total: int) -> None:
            show(done, total, "")

        study = study_logit(
            chosen, epsilons=wanted, repeats=repeats, root=given.data, on_run=on_run
        )
    page = write_logit_report(study, given.out or Path("runs") / f"{chosen.name}-surface")
    if given.as_json:
        shared.print_json(study.to_dict() | {"page": str(page)})
        return
    for ascent in study.private[::repeats]:
        _print(f"epsilon {ascent.epsilon:<8g}", ascent.points[-1], ascent.loss)
    _print(f"{'no privacy':<16}", study.ordinary[-1], study.loss)
    typer.echo(f"page      {page}")


def _print(name: str, point: tuple[float, float], loss: float) -> None:
    typer.echo(f"{name} log-odds {point[0]:8.4f}   slope {point[1]:8.4f}   loss {loss:.5f}")

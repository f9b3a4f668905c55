"""`tacit surface`: the likelihood surface of a logit model, and the private paths up to its top."""

from pathlib import Path
from typing import Annotated

import typer

from tacit.cli import _run as run
from tacit.cli import _shared as shared

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def surface(
    recipe: run.RecipeName = "pums-married",
    *,
    epsilons: Annotated[str, typer.Option(help="Comma-separated budgets.")] = "0.03,0.1,0.3,1",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, to see the spread.")] = 5,
    data: run.Root = None,
    out: run.Out = None,
    seed: run.Seed = None,
    settings: run.Settings = None,
    as_json: shared.AsJson = False,
) -> None:
    """Draw the log-likelihood of a logit model of one attribute, with the paths of DP-SGD on it.

    Writes report.html, study.json, and the figures' data as CSV: the surface, the fitted curve,
    and the loss against epsilon. For public data.

    \b
    Example:
      tacit surface pums-married --data DATA
    """
    from tacit.experiments import study_logit
    from tacit.report import write_logit_report

    chosen = run.recipe_of(recipe, settings, run__seed=seed)
    wanted = shared.numbers(epsilons, "--epsilons")
    if not wanted:
        raise typer.BadParameter("--epsilons must name at least one budget.")
    study = study_logit(chosen, epsilons=wanted, repeats=repeats, root=data)
    folder = out or Path("runs") / f"{chosen.name}-surface"
    page = write_logit_report(study, folder)
    if as_json:
        shared.print_json(study.to_dict() | {"page": str(page)})
        return
    for ascent in study.private[::repeats]:
        log_odds, slope = ascent.points[-1]
        typer.echo(
            f"epsilon {ascent.epsilon:<8g} log-odds {log_odds:8.4f}   slope {slope:8.4f}   "
            f"loss {ascent.loss:.5f}"
        )
    log_odds, slope = study.ordinary[-1]
    typer.echo(
        f"{'no privacy':<16} log-odds {log_odds:8.4f}   slope {slope:8.4f}   loss {study.loss:.5f}"
    )
    typer.echo(f"page      {page}")

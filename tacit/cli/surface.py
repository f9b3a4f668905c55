"""`tacit surface`: the likelihood surface of a logit model, and the paths of DP-SGD on it."""

from pathlib import Path

import typer

from tacit.cli import _shared as shared


def surface(
    recipe: shared.RecipeName = "pums-married",
    *,
    epsilons: shared.Epsilons = "0.03,0.1,0.3,1",
    repeats: shared.Repeats = 5,
    data: shared.Root = None,
    out: shared.Out = None,
    seed: shared.Seed = None,
    settings: shared.Settings = None,
    as_json: shared.AsJson = False,
) -> None:
    """Draw the log-likelihood of a logit model with one attribute, and DP-SGD's paths on it.

    The data must be public, because the surface is computed without noise. Writes report.html,
    study.json, and three figures with their data as CSV: the surface, the fitted curve, and the
    loss against epsilon.

    \b
    Example:
      tacit surface pums-married --data DATA
    """
    from tacit.experiments import study_logit
    from tacit.report import write_logit_report

    chosen = shared.recipe_of(recipe, settings, run__seed=seed)
    wanted = shared.numbers(epsilons, "--epsilons")
    if not wanted:
        raise typer.BadParameter("--epsilons must name at least one budget.")
    study = study_logit(chosen, epsilons=wanted, repeats=repeats, root=data)
    page = write_logit_report(study, out or Path("runs") / f"{chosen.name}-surface")
    if as_json:
        shared.print_json(study.to_dict() | {"page": str(page)})
        return
    for ascent in study.private[::repeats]:
        _print(f"epsilon {ascent.epsilon:<8g}", ascent.points[-1], ascent.loss)
    _print(f"{'no privacy':<16}", study.ordinary[-1], study.loss)
    typer.echo(f"page      {page}")


def _print(name: str, point: tuple[float, float], loss: float) -> None:
    typer.echo(f"{name} log-odds {point[0]:8.4f}   slope {point[1]:8.4f}   loss {loss:.5f}")

"""`tacit sweep`: one recipe at several epsilons and deltas, several times each, in parallel.

Exit codes: 0 done; 2 something was wrong; 130 interrupted: the same command goes on.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tacit.cli import _run as run
from tacit.cli import _shared as shared

if TYPE_CHECKING:
    from tacit.experiments import Facts, Sweep

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def sweep(
    recipe: run.RecipeName = "digits",
    *,
    epsilons: Annotated[str, typer.Option(help="Comma-separated budgets.")] = "0.5,1,2,4,8",
    deltas: Annotated[str, typer.Option(help="Comma-separated deltas [the recipe's].")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, to see the spread.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time.")] = 1,
    data: run.Root = None,
    out: run.Out = None,
    seed: run.Seed = None,
    settings: run.Settings = None,
    page: run.WithPage = True,
    as_json: shared.AsJson = False,
) -> None:
    """Train a recipe at several budgets; what is finished is kept when called again.

    \b
    Example:
      tacit sweep mnist --epsilons 0.5,1,3 --repeats 5 --jobs 2 --data DATA
    """
    from rich.console import Console
    from rich.progress import Progress

    from tacit.experiments import sweep as run_sweep

    chosen = run.recipe_of(recipe, settings, run__seed=seed)
    folder = out or Path("runs") / f"{chosen.name}-sweep"
    wanted = shared.numbers(epsilons, "--epsilons")
    at = shared.numbers(deltas, "--deltas")
    console = Console(stderr=True)
    is_off = as_json or not console.is_terminal
    try:
        with Progress(console=console, disable=is_off) as bar:
            count = len(set(wanted)) * max(1, len(at)) * repeats
            task = bar.add_task(f"{chosen.name}, {count} runs", total=count)

            def show(facts: "Facts") -> None:
                accuracy = facts.utility.private[0].value
                bar.console.print(f"epsilon {facts.epsilon:.3f}: accuracy {accuracy:.2%}")
                bar.advance(task)

            result = run_sweep(
                chosen,
                folder,
                epsilons=wanted,
                deltas=at,
                repeats=repeats,
                jobs=jobs,
                root=data,
                on_run=None if is_off else show,
            )
    except KeyboardInterrupt:
        typer.echo("\ninterrupted; the same command goes on.", err=True)
        raise typer.Exit(130) from None
    written = run.write_page(folder) if page else None
    if written is not None:
        for cell in result.cells:  # each may be released alone, with its own certificate
            run.write_page(folder / cell.folder)
    if as_json:
        found = {"folder": str(folder), "page": None if written is None else str(written)}
        shared.print_json(result.to_dict() | found)
    else:
        _print(result, folder)
        if written is not None:
            typer.echo(f"page    {written}")


def _print(result: "Sweep", folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("epsilon", "delta", "runs", "accuracy", "spread", box=None, pad_edge=False)
    for row in result.summaries:
        spread = "" if row.spread is None else f"{row.spread:.2%}"
        table.add_row(
            f"{row.epsilon:g}", f"{row.delta:g}", str(row.runs), f"{row.accuracy:.2%}", spread
        )
    if result.baseline is not None:
        table.add_row("infinity", "", "1", f"{result.baseline['accuracy']:.2%}", "")
    Console().print(table)
    typer.echo(f"releasing every run would cost epsilon {shared.round_up(result.epsilon_of_all)}")
    typer.echo(f"runs in {folder}")

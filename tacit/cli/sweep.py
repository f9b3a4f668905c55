"""`tacit sweep`: one recipe at several epsilons and deltas, several times each, in parallel.

Exit codes: 0 done; 2 an error; 130 interrupted, and the same command resumes the sweep.
"""

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tacit.cli import _shared as shared
from tacit.cli import _tables as tables
from tacit.cli._options import expanded

if TYPE_CHECKING:
    from tacit.experiments import Facts, Sweep


@expanded
def sweep(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="A recipe file, a built-in recipe, or a table."),
    ] = "digits",
    *,
    epsilons: shared.Epsilons = "0.5,1,2,4,8",
    deltas: Annotated[
        str, typer.Option(help="Deltas, separated by commas [the recipe's delta].")
    ] = "",
    repeats: shared.Repeats = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Number of runs at the same time.")] = 1,
    given: tables.RecipeOptions,
) -> None:
    """Train a recipe at several budgets. The same command resumes an interrupted sweep.

    The figures show accuracy against epsilon, one line for each delta, with the spread over runs.
    Each run of a private table pays for its own measurement; a --ledger pays for all runs.

    \b
    Example:
      tacit sweep mnist --epsilons 0.5,1,3 --repeats 5 --jobs 2 --data DATA
      tacit sweep people.csv --schema people.toml --epsilons 0.3,1,3 --deltas 1e-5,1e-7 --repeats 5
    """
    from tacit.experiments import sweep as run_sweep

    wanted = shared.numbers(epsilons, "--epsilons")
    at = shared.numbers(deltas, "--deltas")
    middle = sorted(wanted)[len(wanted) // 2] if wanted else None  # the settings of a table suit it
    is_table = given.schema is not None or tables.is_table(recipe)
    chosen = given.recipe(recipe, epsilon=middle if is_table else None)
    folder = given.out or Path("runs") / f"{chosen.name}-sweep"
    total = len(set(wanted)) * max(1, len(at)) * repeats
    done = count(1)
    with shared.progress_bar(f"{chosen.name}, {total} runs", is_hidden=given.as_json) as show:

        def on_run(facts: "Facts") -> None:
            accuracy = facts.utility.private[0].value
            show(next(done), total, f"epsilon {facts.epsilon:.3f}: accuracy {accuracy:.2%}")

        try:
            result = run_sweep(
                chosen,
                folder,
                epsilons=wanted,
                deltas=at,
                repeats=repeats,
                jobs=jobs,
                root=given.data,
                on_run=on_run,
            )
        except KeyboardInterrupt:
            typer.echo("\ninterrupted; the same command resumes the sweep.", err=True)
            raise typer.Exit(130) from None
    written = shared.write_page(folder) if given.page else None
    for cell in result.cells:  # each run may be released alone, with its own certificate
        shared.write_results(folder / cell.folder, page=given.page)
    if given.as_json:
        found = {"folder": str(folder), "page": None if written is None else str(written)}
        shared.print_json(result.to_dict() | found)
        return
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

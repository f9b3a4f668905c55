"""`tacit ledger create|show|verify|export FILE`: make a ledger, or read it without changing it.

Exit codes: 0 done; 1 `verify` found the file damaged; 2 another error.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tacit.cli._shared import AsJson, print_json, round_up
from tacit.errors import LedgerError
from tacit.events import Relation
from tacit.ledger import Budget, Entry, Ledger

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Read the ledger of a private data set: its budget, what was spent, and what is left.",
)

_File = Annotated[Path, typer.Argument(metavar="FILE", help="The ledger file.")]


@app.command(epilog="Example: tacit ledger create clinic.ledger --epsilon 4 --delta 1e-6")
def create(
    file: _File,
    epsilon: Annotated[float, typer.Option(help="All that may ever be spent on these records.")],
    delta: Annotated[float, typer.Option(help="Delta of the budget; 0 for pure privacy.")] = 1e-6,
    relation: Annotated[
        Relation, typer.Option(help="How two neighboring data sets differ.")
    ] = Relation.ADD_REMOVE,
    unit: Annotated[str, typer.Option(help="What a record stands for, such as person.")] = "record",
    as_json: AsJson = False,
) -> None:
    """Create the ledger of a private data set, with its budget. It cannot be changed later."""
    if file.exists():
        raise LedgerError(f"{file} exists already. Show it with: tacit ledger show {file}")
    if not file.parent.is_dir():
        raise LedgerError(f"the folder {file.parent} does not exist.")
    budget = Budget(epsilon, delta)
    with Ledger(file, budget=budget, relation=relation, unit=unit) as ledger:
        settings = {"relation": str(ledger.relation), "unit": ledger.unit}
    if as_json:
        print_json({"ledger": str(file), "epsilon": epsilon, "delta": delta} | settings)
    else:
        typer.echo(f"created {file}: {budget} ({relation}, per {unit})")


@app.command(epilog="Example: tacit ledger show clinic.ledger --delta 1e-6")
def show(
    file: _File,
    delta: Annotated[
        float | None, typer.Option(help="Print what is spent at this delta [the budget's].")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the budget, how much of it is spent and left, and every entry of the ledger."""
    with Ledger(file, read_only=True) as ledger:
        history = ledger.history()
        at = delta if delta is not None else (ledger.budget.delta if ledger.budget else None)
        spent = None if at is None else ledger.epsilon(delta=at)
        left = ledger.remaining()
    if as_json:
        budget = ledger.budget
        print_json(
            {
                "budget": budget and {"epsilon": budget.epsilon, "delta": budget.delta},
                "relation": str(ledger.relation),
                "unit": ledger.unit,
                "spent": None if at is None else {"epsilon": spent, "delta": at},
                "left": left._asdict() if budget else None,
                "entries": [entry.to_dict() for entry in history],
            }
        )
        return
    console = Console()
    console.print(_table(file, history))
    console.print(Text(f"Budget: {ledger.budget or 'none'} ({ledger.relation}, per {ledger.unit})"))
    if spent is not None:
        console.print(Text(f"Spent:  epsilon {round_up(spent)} at delta {at:g}"))
    if ledger.budget:
        console.print(Text(f"Left:   {left}"))


@app.command(epilog="Example: tacit ledger verify clinic.ledger")
def verify(file: _File, as_json: AsJson = False) -> None:
    """Check that the file is undamaged: its structure, hashes, totals, prices and budget."""
    if not file.exists():
        raise LedgerError(f"there is no ledger at {file}.")
    try:
        with Ledger(file, read_only=True) as ledger:
            found = ledger.verify()
    except LedgerError as error:
        if as_json:
            print_json({"whole": False, "error": str(error)})
        else:
            typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    if as_json:
        print_json({"whole": True, **found._asdict()})
    else:
        typer.echo(f"whole: {found.entries:,} entries, {found.rows:,} rows, head {found.head}")


@app.command(epilog="Example: tacit ledger export clinic.ledger --output clinic.json")
def export(
    file: _File,
    output: Annotated[Path | None, typer.Option(help="Write to this file instead.")] = None,
) -> None:
    """Print the whole ledger as JSON."""
    with Ledger(file, read_only=True) as ledger:
        text = ledger.export()
    if output is None:
        typer.echo(text)
    else:
        output.write_text(text + "\n", encoding="utf-8")


def _table(file: Path, history: list[Entry]) -> Table:
    table = Table("entry", "time (UTC)", "event", "partition", "note", title=Text(str(file)))
    for entry in history:
        event = f"plan: {entry.event}" if entry.kind == "plan" else str(entry.event)
        cells = (str(entry.id), entry.time[:19], event, entry.partition or "", entry.note)
        table.add_row(*(Text(cell) for cell in cells))
    return table

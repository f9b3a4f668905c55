"""`tacit ledger show|verify|export FILE`: look at a ledger, never change it.

Exit codes: 0 all is well, 1 the file is not a whole ledger, 2 wrong usage.
"""

import json
import math
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from tacit.errors import LedgerError
from tacit.ledger import Ledger

app = typer.Typer(
    name="ledger",
    help="Look at the privacy budget of a data set and what it was spent on.",
    no_args_is_help=True,
)

_File = Annotated[Path, typer.Argument(metavar="FILE", help="The ledger file.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
_Delta = Annotated[
    float | None, typer.Option(help="Delta to state the spent epsilon at; the budget's by default.")
]


@app.command(epilog="Example: tacit ledger show clinic.ledger --delta 1e-6")
def show(file: _File, delta: _Delta = None, as_json: _Json = False) -> None:
    """Print the budget, what is left of it, and every entry."""
    with _opened(file) as ledger:
        try:
            facts = _facts(ledger, delta)
            history = ledger.history()
        except LedgerError as error:
            _fail(str(error))
        except ValueError as error:
            _fail(str(error), code=2)
    if as_json:
        typer.echo(
            json.dumps(facts | {"entries": [entry.to_dict() for entry in history]}, indent=2)
        )
        return
    table = Table("entry", "time (UTC)", "event", "partition", "note", title=str(file))
    for entry in history:
        event = f"plan: {entry.event}" if entry.kind == "plan" else str(entry.event)
        cells = (str(entry.id), entry.time[:19], event, entry.partition or "", entry.note)
        table.add_row(*(cell.replace("[", r"\[") for cell in cells))
    console = Console()
    console.print(table)
    for name, value in facts.items():
        console.print(f"{name.replace('_', ' ')}: {_text(value)}", markup=False, highlight=False)


@app.command(epilog="Example: tacit ledger verify clinic.ledger")
def verify(file: _File, as_json: _Json = False) -> None:
    """Check that the file is whole: structure, hash chain, totals, prices, budget."""
    with _opened(file) as ledger:
        try:
            found = ledger.verify()
        except LedgerError as error:
            _fail(str(error))
    if as_json:
        typer.echo(json.dumps(found._asdict()))
    else:
        typer.echo(f"whole: {found.entries:,} entries, {found.rows:,} rows, head {found.head}")


@app.command(epilog="Example: tacit ledger export clinic.ledger --output clinic.json")
def export(
    file: _File,
    output: Annotated[Path | None, typer.Option(help="Write to this file.")] = None,
) -> None:
    """Print the whole ledger as JSON."""
    with _opened(file) as ledger:
        try:
            text = ledger.export()
        except LedgerError as error:
            _fail(str(error))
    if output is None:
        typer.echo(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        _fail(f"{output} cannot be written: {error.strerror}.", code=2)


def _opened(file: Path) -> Ledger:
    if not file.exists():
        _fail(f"there is no file {file}.", code=2)
    try:
        return Ledger(file, read_only=True)
    except LedgerError as error:
        _fail(str(error))


def _facts(ledger: Ledger, delta: float | None) -> dict[str, object]:
    """What `show` prints under the table; infinity becomes None."""
    facts: dict[str, object] = {
        "relation": str(ledger.relation),
        "unit": ledger.unit,
        "budget_epsilon": ledger.budget and ledger.budget.epsilon,
        "budget_delta": ledger.budget and ledger.budget.delta,
    }
    at = delta if delta is not None else (ledger.budget.delta if ledger.budget else None)
    if at:
        facts |= {"delta": at, "spent_epsilon": _finite(ledger.epsilon(delta=at))}
    if ledger.budget:
        left = ledger.remaining()
        facts |= {f"left_{name}": _finite(value) for name, value in left._asdict().items()}
    return facts


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "none" if value is None else str(value)


def _fail(message: str, *, code: int = 1) -> NoReturn:
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(code)

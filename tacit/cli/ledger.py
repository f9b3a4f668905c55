"""`tacit ledger create|show|verify|export|page|move|grant`: make, read and move a ledger.

Exit codes: 0 done; 1 `verify` found the file damaged; 2 another error.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tacit._untrusted import printable
from tacit.cli._shared import AsJson, print_json, round_down, round_up
from tacit.errors import LedgerError, WeakGuarantee
from tacit.events import Relation
from tacit.ledger import Budget, Entry, Epsilons, Ledger, Remaining, connect, move

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
    server: Annotated[
        str | None,
        typer.Option(help="Keep it at postgresql://HOST/DB#NAME; FILE then points there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create the ledger of a private data set, with its budget. It cannot be changed later.

    With --server the ledger is for a team. If it exists there, FILE is connected with it.
    """
    if file.exists():
        raise LedgerError(f"{file} exists already. Show it with: tacit ledger show {file}")
    if not file.parent.is_dir():
        raise LedgerError(f"the folder {file.parent} does not exist.")
    budget = Budget(epsilon, delta)
    WeakGuarantee.issue(epsilon=epsilon)
    with Ledger(server or file, budget=budget, relation=relation, unit=unit) as ledger:
        if server is not None:
            connect(file, server)
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
        history, budget = ledger.history(), ledger.budget
        at = delta if delta is not None else (budget.delta if budget else None)
        spent = None if at is None else ledger.epsilon(delta=at)
        three = ledger.epsilons(delta=at) if at else None
        left = ledger.remaining()
        with ledger.store.reading():
            moved_to = ledger.store.check().moved_to
    costs = left.prices(delta=budget.delta, relation=ledger.relation) if budget else []
    if as_json:
        room = left._asdict() | {"copied_event": left.copied_event and left.copied_event.to_dict()}
        print_json(
            {
                "budget": budget and {"epsilon": budget.epsilon, "delta": budget.delta},
                "relation": str(ledger.relation),
                "unit": ledger.unit,
                "spent": None if at is None else {"epsilon": spent, "delta": at},
                "epsilons": three and {**three._asdict(), "delta": at},
                "left": room if budget else None,
                "next": [{"epsilon": epsilon, "run": words} for epsilon, words in costs],
                "moved_to": moved_to or None,
                "entries": [entry.to_dict() for entry in history],
            }
        )
        return
    console = Console()
    console.print(_table(file, history))
    unit = printable(ledger.unit)
    console.print(Text(f"Budget: {ledger.budget or 'none'} ({ledger.relation}, per {unit})"))
    if spent is not None:
        console.print(Text(_spent(spent, three, f"at delta {at:g}")), soft_wrap=True)
    if moved_to:
        console.print(Text(f"Moved:  to {printable(moved_to)}. Nothing can be spent from here."))
    elif budget:
        console.print(Text(_left(budget, left, costs, is_new=not history)), soft_wrap=True)


@app.command(epilog="Example: tacit ledger verify clinic.ledger")
def verify(
    file: _File,
    head: Annotated[
        str | None, typer.Option(help="A head noted earlier, which the ledger must continue from.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the file: its structure, hashes, totals, prices, budget, and its witness if it has one.

    Without --head and without a witness, an older copy of the file cannot be told from the newest.
    """
    if not file.exists():
        raise LedgerError(f"there is no ledger at {file}.")
    try:
        with Ledger(file, read_only=True) as ledger:
            found = ledger.verify(head=head)
    except LedgerError as error:
        if as_json:
            print_json({"whole": False, "error": str(error)})
        else:
            typer.secho(f"error: {printable(str(error))}", fg=typer.colors.RED, err=True)
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


@app.command(epilog="Example: tacit ledger page clinic.ledger --output clinic.html")
def page(
    file: _File,
    output: Annotated[Path | None, typer.Option(help="The page [FILE.html].")] = None,
    delta: Annotated[float | None, typer.Option(help="State costs at it [the budget's].")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a page with the budget, what was spent over time, and by which run."""
    from tacit.report import write_ledger_page

    target = output or file.with_name(file.name + ".html")
    with Ledger(file, read_only=True) as ledger:
        write_ledger_page(ledger, target, delta=delta)
    _tell({"page": str(target)}, f"wrote {target}", as_json)


@app.command(
    name="move", epilog="Example: tacit ledger move clinic.ledger team.ledger --server URL"
)
def move_command(
    file: _File,
    target: Annotated[Path, typer.Argument(help="The new file, which must not exist.")],
    server: Annotated[
        str | None,
        typer.Option(help="Move to postgresql://HOST/DB#NAME; TARGET then points there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Move a ledger with its history; nothing can be spent from the old one afterwards."""
    if target.exists():
        raise LedgerError(f"{target} exists already. Give a file that does not exist.")
    move(file, server or target)
    if server is not None:
        connect(target, server)
    _tell({"moved": str(file), "to": str(target)}, f"moved {file} to {target}", as_json)


@app.command(epilog="Example: tacit ledger grant team.ledger ana --spend")
def grant(
    file: _File,
    role: Annotated[str, typer.Argument(help="A role of the server.")],
    spend: Annotated[
        bool, typer.Option("--spend/--read-only", help="Whether it may also spend.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Let a role of the server read a ledger, or also spend from it. For the ledger's owner."""
    with Ledger(file) as ledger:
        ledger.grant(role, spend=spend)
    text = f"{role} may {'spend from' if spend else 'read'} {file}"
    _tell({"role": role, "may_spend": spend}, text, as_json)


def _tell(found: dict[str, object], text: str, as_json: bool) -> None:
    """Print what a command did, in words or as JSON."""
    if as_json:
        print_json(found)
    else:
        typer.echo(text)


def _spent(spent: float, three: Epsilons | None, at: str) -> str:
    """Return what the entries so far cost, with the question that each number answers."""
    if three is None:
        return f"Spent:  epsilon {round_up(spent)} {at}"
    cut = "; the budget guarantees this number" if spent < three.odometer else ""
    return (
        f"Spent:  epsilon {round_up(three.fixed_in_advance)} {at} if all entries were planned "
        "before the first result was seen\n"
        f"        epsilon {round_up(spent)} {at} however the entries were chosen{cut}"
    )


def _left(budget: Budget, left: Remaining, costs: list[tuple[float, str]], *, is_new: bool) -> str:
    """Return how much the next run may cost, which is not the budget minus what was spent."""
    if is_new:
        return f"Left:   everything. The first run may cost up to {budget} at once"
    if not costs:
        return "Left:   nothing. Every further payment will be refused"
    lines = [f"epsilon {round_down(epsilon, 4)} if it is {words}" for epsilon, words in costs]
    if budget.delta:
        lines.append("Costs do not simply add up, so this is not the budget minus what was spent")
    share = f"{100 * left.fraction:.3g} % of the budget's room"
    first = f"Left:   {share}. The next run alone may cost, at delta {budget.delta:g}, up to"
    return "\n        ".join([first, *lines])


def _table(file: Path, history: list[Entry]) -> Table:
    table = Table(
        "entry", "time (UTC)", "event", "partition", "note", title=Text(printable(str(file)))
    )
    for entry in history:
        event = f"plan: {entry.event}" if entry.kind == "plan" else str(entry.event)
        where = ", ".join(entry.partitions)
        cells = (str(entry.id), entry.time[:19], event, where, entry.note)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table

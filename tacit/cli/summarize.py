"""`tacit summarize`: private statistics of a table, each with a confidence interval."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tacit import events as ev
from tacit.cli import _shared as shared

RESULT = "summary.json"


def summarize(
    table: Annotated[Path, typer.Argument(help="CSV or Parquet file of private records.")],
    *,
    schema: Annotated[Path, typer.Option(help="TOML file that declares the columns.")],
    epsilon: shared.Epsilon,
    delta: Annotated[float, typer.Option(help="0 asks for pure differential privacy.")] = 0.0,
    quantiles: Annotated[
        str, typer.Option(help="Probabilities of the quantiles, separated by commas.")
    ] = "0.25,0.5,0.75",
    about: Annotated[
        str, typer.Option(help="What intervals are about: population or records.")
    ] = "population",
    confidence: Annotated[float, typer.Option(help="Confidence of each interval.")] = 0.95,
    relation: Annotated[
        ev.Relation | None, typer.Option(help="How neighboring tables differ [the ledger's].")
    ] = None,
    ledger: shared.LedgerFile = None,
    seed: shared.Seed = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for summary.json. If it is there, nothing is paid.")
    ] = None,
    as_json: shared.AsJson = False,
) -> None:
    """Print counts, means, deviations, quantiles and shares of the declared columns.

    A twentieth of epsilon first pays for a noisy count of values outside the declared domains: a
    wrong schema is refused before the rest is spent.

    \b
    Example:
      tacit summarize census.csv --schema census.toml --epsilon 1 --ledger census.ledger
    """
    from tacit.datasets import Schema, read_columns, read_rows
    from tacit.experiments import MOST_OUTSIDE
    from tacit.ledger import Ledger
    from tacit.summaries import describe

    probabilities = shared.numbers(quantiles, "--quantiles")
    asked = {
        "table": table.name,
        "epsilon": epsilon,
        "delta": delta,
        "quantiles": probabilities,
        "about": about,
        "confidence": confidence,
    }
    stored = _stored(out, asked)
    if stored is None:
        declared = Schema.read(schema)
        columns, rows = read_columns(table, declared), read_rows(table, declared)
        if ledger is not None and not ledger.exists():
            raise ValueError(f"there is no ledger at {ledger}. Create it first, with its budget.")
        paid_by = None if ledger is None else Ledger(ledger)
        found = describe(
            columns,
            declared,
            probabilities=probabilities,
            about=about,
            flags=dict(zip(declared.checked, rows.flags.T, strict=True)),
            tolerated=MOST_OUTSIDE,
            confidence=confidence,
            epsilon=epsilon,
            delta=delta,
            relation=relation or (paid_by.relation if paid_by else ev.Relation.ADD_REMOVE),
            ledger=paid_by,
            rng=seed,
        )
        stored = {"asked": asked} | found.rounded().to_dict()
        if out is not None:
            text = json.dumps(stored, indent=2, allow_nan=False, ensure_ascii=False)
            (out / RESULT).write_text(text + "\n", encoding="utf-8")
    if as_json:
        shared.print_json(stored)
    else:
        _show(stored, out)


def _stored(out: Path | None, asked: dict[str, Any]) -> dict[str, Any] | None:  # Any: JSON values
    """Return the summary that `out` holds; make the folder and return None if it holds none."""
    if out is None:
        return None
    if not (out / RESULT).is_file():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"--out {out} must be a new or empty folder.")
        out.mkdir(parents=True, exist_ok=True)
        return None
    try:
        stored = json.loads((out / RESULT).read_text(encoding="utf-8"))
        before = stored["asked"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{out / RESULT} is no summary. Choose another folder.") from None
    if before != asked:
        raise ValueError(f"{out} holds a summary with other settings. Choose another folder.")
    return stored


def _show(stored: dict[str, Any], out: Path | None) -> None:  # Any: JSON values
    from tacit.summaries import Statistic, StatisticTable

    rows = tuple(Statistic.from_dict(row) for row in stored["rows"])
    event, relation = ev.from_dict(stored["event"]), ev.Relation(stored["relation"])
    table = StatisticTable(rows, event, stored["epsilon"], stored["delta"], relation)
    typer.echo(str(table))
    if out is not None:
        typer.echo(f"wrote {out / RESULT}")

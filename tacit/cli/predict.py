"""`tacit predict RUN/ FILE`: apply the model of a finished run to a table."""

import csv
import io
from pathlib import Path
from typing import Annotated

import typer

from tacit.cli import _shared as shared


def predict(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    table: Annotated[Path, typer.Argument(metavar="FILE", help="CSV or Parquet file.")],
    *,
    interval: Annotated[
        float | None,
        typer.Option(help="Add intervals with this confidence, such as 0.95 (tacit regress)."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="CSV file to write; else print it.")] = None,
    as_json: shared.AsJson = False,
) -> None:
    """Predict the target of each record of FILE, with probabilities where the model has them.

    FILE needs the columns of the features, by the names of the run's schema. The model was paid
    for, so this costs nothing. A table that the schema does not describe is refused.

    \b
    Example:
      tacit predict runs/people-epsilon-1 new.csv --out predicted.csv
      tacit predict runs/people-regression new.csv --interval 0.95
    """
    from tacit.experiments import predict_table

    if out is not None:
        shared.require_file(out)
    found = predict_table(folder, table, interval=interval)
    if found.undescribed:
        typer.echo(
            "note: some values are not as the schema declares, and were replaced by its rules: "
            f"{', '.join(found.undescribed)}",
            err=True,
        )
    if as_json:
        rows = [dict(zip(found.columns, row, strict=True)) for row in found.rows]
        shared.print_json({"predictions": rows})
        return
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([found.columns, *found.rows])
    if out is None:
        typer.echo(text.getvalue(), nl=False)
        return
    out.write_text(text.getvalue(), encoding="utf-8")
    typer.echo(f"wrote {len(found.rows):,} predictions to {out}")

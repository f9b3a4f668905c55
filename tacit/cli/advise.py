"""`tacit advise`: settings for a table from public facts, and the noise to expect."""

from pathlib import Path
from typing import Annotated

import typer

from tacit.cli import _shared as shared
from tacit.cli import _tables as tables


def advise(
    table: Annotated[
        Path | None, typer.Argument(help="CSV or Parquet file, to count its records.")
    ] = None,
    *,
    epsilon: shared.Epsilon,
    delta: shared.MaybeDelta = None,
    schema: tables.MaybeSchema = None,
    records: shared.MaybeRecords = None,
    columns: Annotated[
        int | None, typer.Option(min=1, help="Number of features, without a schema.")
    ] = None,
    as_json: shared.AsJson = False,
) -> None:
    """Say which method suits a table, with its settings, and what noise to expect.

    The advice uses the number of records, the schema and EPSILON, and reads no value.

    \b
    Example:
      tacit advise people.csv --schema people.toml --epsilon 1
      tacit advise --records 20000 --columns 30 --epsilon 0.5
    """
    from tacit.datasets import Dialect, Schema, count_rows
    from tacit.experiments import LinearAdvice, advise_linear
    from tacit.experiments import advise as advise_on

    n_features, n_classes = columns, 2
    declared = None if schema is None else Schema.read(schema)
    if declared is not None:
        n_features = max(1, len(declared.feature_names))
        n_classes = declared.n_classes if declared.target else 2
    if records is None and table is not None:
        records = count_rows(table, Dialect() if declared is None else declared.dialect)
    if records is None or n_features is None:
        raise ValueError("advise needs a table or --records, and --schema or --columns.")
    if n_classes is None:
        found = advise_linear(
            n_records=records, n_features=n_features, epsilon=epsilon, delta=delta
        )
    else:
        found = advise_on(
            n_records=records,
            n_features=n_features,
            epsilon=epsilon,
            delta=delta,
            n_classes=n_classes,
        )
    if as_json:
        shared.print_json({"records": records, "features": n_features, **found.to_dict()})
        return
    typer.echo(f"{records:,} records, {n_features} features, epsilon {epsilon:g}")
    typer.echo(f"method         {found.method}")
    if not isinstance(found, LinearAdvice):  # least squares takes none of these
        typer.echo(f"batch size     {found.batch_size:,}")
        typer.echo(f"epochs         {found.epochs:g}")
        typer.echo(f"clipping norm  {found.clip_norm:g}")
        typer.echo(f"learning rate  {found.learning_rate:g}")
    typer.echo(f"noise          {found.in_words}")

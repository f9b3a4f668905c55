"""`tacit schema init|check`: begin the declaration of a table, and check it.

Exit codes: 0 done; 2 the schema, or the file's header, has an error.
"""

from pathlib import Path
from typing import Annotated

import typer

from tacit.cli._shared import AsJson, print_json
from tacit.cli._tables import note_weights

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Declare what the columns of a table may hold: write a first schema, or check one.",
)

_HOW = """\
# What the columns of {file} may hold. Fill in every "" from public knowledge: a codebook, a law, a
# unit. Never look at the values: what you learn from them is not paid for.
#
#   age = [18, 93]                      a number with its bounds
#   region = ["north", "south"]         categories
#   employed = "boolean"                true or false, 1 or 0, yes or no
#   patient = "person"                  whose record it is: the unit of privacy
#   name = "ignored"                    not used
#
# More settings go into a section of their own:
#   [columns.schooling]
#   type = "ordered"                    number, category, boolean, ordered, weight, ...
#   categories = ["none", "primary", "secondary"]
#   missing = "none"                    what a missing value becomes

target = ""                             # the column to predict; delete the line for summaries

[columns]
"""


@app.command(epilog="Example: tacit schema init people.csv --out people.toml")
def init(
    file: Annotated[Path, typer.Argument(help="CSV or Parquet file.")],
    *,
    separator: Annotated[str, typer.Option(help="Sign between fields; tab for tabulators.")] = ",",
    header: Annotated[
        bool, typer.Option(help="Whether the first line holds the names; else c1, c2, ....")
    ] = True,
    encoding: Annotated[str, typer.Option(help="utf-8, latin-1 or cp1252.")] = "utf-8",
    skip_lines: Annotated[int, typer.Option(help="Lines above the header or first record.")] = 0,
    out: Annotated[Path | None, typer.Option(help="File to write [FILE with .toml].")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a schema with the names of the columns; types and bounds are for you to fill in.

    Only the header is read, never a value. Types come from Parquet, where it declares them.
    """
    import tomli_w

    from tacit.datasets import Dialect, column_names

    given = {"separator": "\t" if separator == "tab" else separator, "header": header}
    given |= {"encoding": encoding, "skip_lines": skip_lines}
    names = column_names(file, Dialect.from_dict(given))
    written = out or file.with_name(file.name.split(".")[0] + ".toml")
    if written.exists():
        raise ValueError(f"{written} exists already. Choose another file with --out.")
    known = Dialect()
    file_section = {k: v for k, v in given.items() if v != getattr(known, k)}
    text = _HOW.format(file=file.name.replace("\n", " ")) + "".join(
        _line(name, kind, tomli_w.dumps) for name, kind in names.items()
    )
    if file_section:
        text += "\n" + tomli_w.dumps({"file": file_section})
    written.write_text(text, encoding="utf-8")
    if len(names) == 1 and any(sign in next(iter(names)) for sign in ";\t|,"):
        typer.echo("note: there is one column. Is --separator right?", err=True)
    if as_json:
        print_json({"schema": str(written), "columns": list(names)})
    else:
        columns = "1 column" if len(names) == 1 else f"{len(names)} columns"
        typer.echo(f'wrote {written} with {columns}; fill in every "".')


@app.command(epilog="Example: tacit schema check people.toml people.csv")
def check(
    schema: Annotated[Path, typer.Argument(help="TOML file of a schema.")],
    table: Annotated[
        Path | None, typer.Argument(help="Also check that this file has the columns.")
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Check a schema, and that the header of a file has its columns. No value is read."""
    from tacit.datasets import Schema, column_names, find_columns

    declared = Schema.read(schema)
    if table is not None:
        names = column_names(table, declared.dialect)
        find_columns(table.name, declared.needed, list(names), declared.dialect)
    types = {column.name: column.type for column in declared.declared}
    note_weights(declared)
    if as_json:
        print_json(
            {
                "target": declared.target or None,
                "columns": types,
                "features": list(declared.feature_names),
                "unit": declared.unit,
            }
        )
        return
    target = f"target {declared.target}" if declared.target else "no target"
    typer.echo(
        f"{schema.name} is right: {len(types)} columns, {len(declared.feature_names)} features, "
        f"{target}, unit of privacy: one {declared.unit}"
    )


def _line(name: str, kind: str, dumps) -> str:  # tomli_w.dumps
    """Return the line of one column; a Parquet file declares booleans and says what is a number."""
    key = dumps({name: ""}).partition(" = ")[0]
    if kind == "bool":
        return f'{key} = "boolean"\n'
    return f'{key} = ""' + (f"  # {kind} in the file" if kind else "") + "\n"

"""`tacit report`: certificate, figures and page of a finished run or sweep."""

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run or sweep.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write certificate.json, figures/*.csv and report.html into a run or sweep folder.

    Example: tacit report runs/digits
    """
    from tacit.report import write_page

    page = write_page(run)
    typer.echo(json.dumps({"report": str(page)}) if as_json else f"wrote {page}")

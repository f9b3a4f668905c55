"""`tacit report`: certificate, figures and page of a finished run or sweep."""

from pathlib import Path
from typing import Annotated

import typer

from tacit.cli import _shared as shared


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run or sweep.")],
    as_json: shared.AsJson = False,
) -> None:
    """Write report.html, the figures, and for a run certificate.json, into its folder.

    Example: tacit report runs/digits
    """
    from tacit.report import write_page

    page = write_page(run)
    if as_json:
        shared.print_json({"report": str(page)})
    else:
        typer.echo(f"wrote {page}")

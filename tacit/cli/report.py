"""`tacit report`: certificate, figures and page of a finished run or sweep; comparison of runs."""

from pathlib import Path
from typing import Annotated

import typer

from tacit.cli import _shared as shared


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Folder of a finished run or sweep, or of several runs."
        ),
    ],
    *,
    out: Annotated[
        Path, typer.Option(help="Folder for the page that compares several runs.")
    ] = Path("comparison"),
    as_json: shared.AsJson = False,
) -> None:
    """Write report.html, the figures, and for a run certificate.json, into its folder.

    Several runs are compared on one page: what differs, and epsilon against accuracy.

    \b
    Examples:
      tacit report runs/digits
      tacit report runs/digits-epsilon-1 runs/digits-epsilon-3 --out comparison
    """
    from tacit.report import write_comparison, write_page

    page = write_page(runs[0]) if len(runs) == 1 else write_comparison(runs, out)
    if as_json:
        shared.print_json({"report": str(page)})
    else:
        typer.echo(f"wrote {page}")

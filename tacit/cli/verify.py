"""`tacit verify`: check that a certificate holds.

Exit codes: 0 it holds; 1 it does not; 2 an error.
"""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from tacit.cli import _shared as shared


def verify(
    certificate: Annotated[Path, typer.Argument(help="certificate.json of a run.")],
    as_json: shared.AsJson = False,
) -> None:
    """Compute the price of a certificate's events again, and compare the model with its hash.

    The exit code is 0 if everything agrees, and 1 if anything differs.

    Example: tacit verify runs/digits/certificate.json
    """
    from tacit.report import Problem
    from tacit.report import verify as check

    twice: list[str] = []  # programs use the last of two equal names, people may read the first

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:  # Any: JSON values
        names = [name for name, _ in pairs]
        twice.extend(sorted({name for name in names if names.count(name) > 1}))
        return dict(pairs)

    try:
        text = certificate.read_text(encoding="utf-8")
        content = json.loads(text, object_pairs_hook=once)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as wrong:
        raise ValueError(f"{certificate.name} is not JSON: {wrong}") from None
    problems = check(content, folder=certificate.parent)
    problems += [Problem(name, "appears twice") for name in twice]
    if as_json:
        found = [{"field": p.field, "what": p.what} for p in problems]
        shared.print_json({"holds": not problems, "problems": found})
    elif problems:
        for problem in problems:
            typer.secho(f"{problem.field}: {problem.what}", fg="red", err=True)
    else:
        claim = content["claim"]
        epsilon = math.inf if claim["epsilon"] is None else claim["epsilon"]
        typer.secho("holds: ", fg="green", nl=False)
        typer.echo(
            f"epsilon {shared.round_up(epsilon)} at delta {claim['delta']:g}, {content['title']}"
        )
    if problems:
        raise typer.Exit(1)

"""`tacit verify`: does a certificate hold?"""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from tacit.cli._shared import round_up

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def verify(
    certificate: Annotated[Path, typer.Argument(help="certificate.json of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Price the events of a certificate again and compare the model file with its hash.

    Exit code 0 if everything holds, 1 on any mismatch.

    Example: tacit verify runs/digits/certificate.json
    """
    from tacit.report import Problem
    from tacit.report import verify as check

    twice: list[str] = []  # programs keep the last of two, people may read the first

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
    problems += [Problem(name, "is there twice") for name in twice]
    if as_json:
        found = [{"field": p.field, "what": p.what} for p in problems]
        typer.echo(json.dumps({"holds": not problems, "problems": found}))
    elif problems:
        for problem in problems:
            typer.secho(f"{problem.field}: {problem.what}", fg="red", err=True)
    else:
        claim = content["claim"]
        epsilon = math.inf if claim["epsilon"] is None else claim["epsilon"]
        typer.secho("holds: ", fg="green", nl=False)
        typer.echo(f"epsilon {round_up(epsilon)} at delta {claim['delta']:g}, {content['title']}")
    if problems:
        raise typer.Exit(1)

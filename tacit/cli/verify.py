"""`tacit verify`: does a certificate hold?"""

import json
from pathlib import Path
from typing import Annotated

import typer

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
    from tacit.report import verify as check

    try:
        content = json.loads(certificate.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as wrong:
        raise ValueError(f"{certificate.name} is not JSON: {wrong}") from None
    problems = check(content, folder=certificate.parent)
    if as_json:
        found = [{"field": p.field, "what": p.what} for p in problems]
        typer.echo(json.dumps({"holds": not problems, "problems": found}))
    elif problems:
        for problem in problems:
            typer.secho(f"{problem.field}: {problem.what}", fg="red", err=True)
    else:
        claim = content["claim"]
        typer.secho("holds: ", fg="green", nl=False)
        typer.echo(
            f"epsilon {claim['epsilon']:.6g} at delta {claim['delta']:g}, {content['title']}"
        )
    if problems:
        raise typer.Exit(1)

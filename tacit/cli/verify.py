"""`tacit verify`: derive a certificate again, and check who signed it.

Exit codes: 0 consistent, and with --key authenticated; 1 it does not verify; 2 an error.
"""

import math
from pathlib import Path
from typing import Annotated

import typer

from tacit._untrusted import printable, time_limit
from tacit.cli import _shared as shared

_SECONDS = 60.0


def verify(
    run: Annotated[Path, typer.Argument(help="Run folder, or certificate.json alone.")],
    *,
    key: Annotated[
        Path | None,
        typer.Option(help="Public key that you trust: the certificate must be signed with it."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Give up after this time.")] = _SECONDS,
    as_json: shared.AsJson = False,
) -> None:
    """Derive the certificate again from ledger, recipe, facts and model, and compare.

    Every stored hash and every price is computed again. Without --key the best answer is
    "consistent, not authenticated", because whoever can write all files can forge all of them.

    \b
    Examples:
      tacit verify runs/digits
      tacit verify runs/digits --key clinic.pub
    """
    from tacit.report import judge

    if not run.exists():
        raise ValueError(f"there is no run folder or certificate {run}.")
    with time_limit(seconds, what="verification"):
        found = judge(run, key=key)
    if as_json:
        problems = [{"field": p.field, "what": p.what} for p in found.problems]
        shared.print_json({"verdict": found.word, "key": found.key, "problems": problems})
    elif found.problems:
        for problem in found.problems:
            line = printable(f"{problem.field}: {problem.what}")
            typer.secho(line, fg="red", err=True)
    else:
        claim, issuer = found.certificate["claim"], found.certificate.get("issuer")
        epsilon = math.inf if claim["epsilon"] is None else claim["epsilon"]
        stated = f"epsilon {shared.round_up(epsilon)} at delta {claim['delta']:g}"
        signed = f", signed by {issuer} (key {found.key})" if found.key and key else ""
        if found.key and not key:
            signed = f". It names {issuer} as issuer; only --key can prove that"
        typer.secho(f"{found.word}: ", fg="green" if key else "yellow", nl=False)
        typer.echo(printable(f"{stated}, {found.certificate['title']}{signed}"))
    if found.problems:
        raise typer.Exit(1)

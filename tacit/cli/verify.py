"""`tacit verify`: derive a certificate again, and check who signed it.

Exit codes: 0 consistent, and with --key authenticated; 1 it does not verify; 2 an error, or a file
is missing, so that not everything could be checked.
"""

import math
from collections.abc import Collection
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
    ledger: Annotated[
        Path | None,
        typer.Option(help="The ledger that paid, or a copy of it [in the run folder]."),
    ] = None,
    replay: Annotated[
        int, typer.Option(min=0, help="Random stretches of the run to compute again.")
    ] = 0,
    data: shared.Root = None,
    trust_code: shared.TrustCode = None,
    seconds: Annotated[float, typer.Option(help="Give up after this time.")] = _SECONDS,
    as_json: shared.AsJson = False,
) -> None:
    """Derive the certificate again from ledger, recipe, facts and model, and compare.

    Every stored hash and every price is computed again. Without --key the best answer is
    "consistent, not authenticated", because whoever can write all files can forge all of them.
    If a file is missing, such as the ledger that paid, all else is checked and the answer is
    "incomplete" (exit code 2).

    With --replay, stretches of a DP-SGD run are computed again from the records and the key of the
    noise. This needs both, and a recipe with run.stretches.

    \b
    Examples:
      tacit verify runs/digits
      tacit verify runs/digits --key clinic.pub
      tacit verify runs/digits --ledger clinic.ledger
      tacit verify runs/digits --replay 2
    """
    from tacit.report import judge

    if not run.exists():
        raise ValueError(f"there is no run folder or certificate {run}.")
    with time_limit(seconds, what="verification"):
        found = judge(run, key=key, ledger=ledger)
    if as_json:
        listed = {
            name: [{"field": p.field, "what": p.what} for p in problems]
            for name, problems in (("problems", found.problems), ("unchecked", found.unchecked))
        }
        shared.print_json({"verdict": found.word, "key": found.key, **listed})
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
        is_sure = key and not found.unchecked
        typer.secho(f"{found.word}: ", fg="green" if is_sure else "yellow", nl=False)
        typer.echo(printable(f"{stated}, {found.certificate['title']}{signed}"))
    for missing in () if as_json else found.unchecked:
        line = printable(f"not checked: {missing.field}: {missing.what}")
        typer.secho(line, fg="yellow", err=True)
    if found.problems or found.unchecked:
        raise typer.Exit(1 if found.problems else 2)
    if replay and not _is_replayed(run, replay, data, trust_code or (), quiet=as_json):
        raise typer.Exit(1)


def _is_replayed(
    run: Path, stretches: int, data: Path | None, trust_code: Collection[str], *, quiet: bool
) -> bool:
    """Return whether parts of the run come out the same when they are computed again."""
    from tacit.experiments import replay_run

    parts = replay_run(run, stretches=stretches, root=data, trust_code=trust_code)
    for part in parts:
        if not part.is_same:
            typer.secho(f"not reproduced: {part.what}", fg="red", err=True)
        elif not quiet:
            typer.echo(f"computed again: {part.what}")
    return all(part.is_same for part in parts)

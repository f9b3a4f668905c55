"""`tacit sign`: vouch for the certificate of a run with an Ed25519 key."""

from pathlib import Path
from typing import Annotated

import typer

from tacit.cli import _shared as shared


def sign(
    run: Annotated[Path | None, typer.Argument(help="Run folder, or a certificate alone.")] = None,
    *,
    key: Annotated[Path, typer.Option(help="Private key, PEM or OpenSSH. Keep it secret.")],
    issuer: Annotated[str, typer.Option(help="Who vouches for the run.")] = "",
    make_key: Annotated[
        bool, typer.Option("--new-key", help="Make the key first, and its public half KEY.pub.")
    ] = False,
    as_json: shared.AsJson = False,
) -> None:
    """Sign certificate.json of a run, after it was derived again; write certificate.sig.

    \b
    Examples:
      tacit sign --new-key --key clinic.key
      tacit sign runs/digits --key clinic.key --issuer "Clinic of X"
      tacit sign model.certificate.json --key clinic.key --issuer "Clinic of X"
    """
    from tacit.report import new_key
    from tacit.report import sign as sign_certificate

    if run is None and not make_key:
        raise typer.BadParameter(
            "name a run folder or a certificate, or make a key with --new-key."
        )
    name = new_key(key) if make_key else None
    if run is not None:
        name = sign_certificate(run, key, issuer=issuer)
    if as_json:
        shared.print_json({"key": name, "signed": None if run is None else str(run)})
        return
    if make_key:
        typer.echo(f"wrote {key} and {key}.pub; publish the latter")
    if run is not None:
        typer.echo(f"signed {run} with key {name}")

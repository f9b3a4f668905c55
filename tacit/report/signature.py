"""Signatures: who vouches for a certificate. Detached, Ed25519 (RFC 8032).

`certificate.sig` beside `certificate.json` holds the signature of the exact bytes of that file, the
public key and the issuer's name. The signature proves that the holder of the private key signed
this certificate. Whose key it is, the reader has to know from elsewhere: a public key that comes
with the certificate proves nothing.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tacit._untrusted import parse_json, read_json, read_text
from tacit.experiments import RunFolder
from tacit.report.certificate import Problem, seal, verify
from tacit.report.run_certificate import CERTIFICATE, SIGNATURE, verify_run

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

AUTHENTICATED = "authenticated"
CONSISTENT = "consistent, not authenticated"
REFUTED = "does not verify"
FORMAT, VERSION = "tacit signature", 1
_CONTEXT = b"tacit certificate signature, version 1\n"  # no other use of a key signs such bytes
_FIELDS = {"format", "version", "algorithm", "issuer", "public_key", "signature"}


class Verdict(NamedTuple):
    """The answer to whether a certificate can be relied on."""

    word: str
    """`AUTHENTICATED`, `CONSISTENT` or `REFUTED`."""
    problems: list[Problem]
    certificate: dict[str, Any]  # Any: JSON values
    """The certificate that was read; empty if it cannot be read."""
    key: str | None
    """Fingerprint of the key that signed it, if the signature is right."""


def new_key(path: str | Path) -> str:
    """Write a new private key to `path` (mode 0600) and its public key to `path`.pub.

    Return the fingerprint of the key. An existing file is never replaced.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    file, key = Path(path), Ed25519PrivateKey.generate()
    for one in (file, _public_file(file)):
        if one.exists():
            raise FileExistsError(f"{one} exists. A key is never replaced; choose another name.")
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as stream:
        stream.write(private)
    RunFolder(file.parent).write(_public_file(file).name, public)
    return fingerprint(_raw(key.public_key()))


def sign(folder: str | Path, key: str | Path, *, issuer: str) -> str:
    """Sign the certificate in a run folder, and return the fingerprint of the key.

    The certificate is derived again first: `ValueError` if anything in the folder contradicts it.
    Then `issuer` is entered into it, and the signature is written to certificate.sig.
    """
    if not issuer.strip():
        raise ValueError("issuer must name who vouches for the certificate.")
    run, private = RunFolder(folder), _private_key(Path(key))
    problems = verify_run(run.path)
    if problems:
        first = problems[0]
        raise ValueError(
            f"{run.path} is not signed, because it does not verify: {first.field} {first.what}."
        )
    certificate = read_json(run / CERTIFICATE)
    if certificate["version"] == 1:
        raise ValueError("a certificate of version 1 cannot be signed. Run tacit report first.")
    (run / SIGNATURE).unlink(missing_ok=True)  # never a signature beside another certificate
    body = {name: v for name, v in certificate.items() if name != "seal"} | {"issuer": issuer}
    text = json.dumps(body | {"seal": seal(body)}, indent=2) + "\n"
    run.write(CERTIFICATE, text)
    public = _raw(private.public_key())
    signature = {
        "format": FORMAT,
        "version": VERSION,
        "algorithm": "Ed25519",
        "issuer": issuer,
        "public_key": public.hex(),
        "signature": private.sign(_CONTEXT + text.encode()).hex(),
    }
    run.write(SIGNATURE, json.dumps(signature, indent=2) + "\n")
    return fingerprint(public)


def judge(path: str | Path, *, key: str | Path | None = None) -> Verdict:
    """Return whether a run folder or a certificate file can be relied on, and why not.

    In a run folder the certificate is derived again from the other files. For a file without a run
    beside it, prices are computed again and the model file is compared with its hash. With `key`, a
    public key that the reader trusts, the certificate must have a signature by that key. Without
    it the best answer is `CONSISTENT`: whoever can write all files can forge them consistently.
    """
    place = Path(path)
    folder = place if place.is_dir() else place.parent
    file = folder / CERTIFICATE if place.is_dir() else place
    is_run = (place.is_dir() or file.name == CERTIFICATE) and RunFolder(folder).is_finished
    trusted = None if key is None else _public_key(Path(key))
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} holds no {file.name}, so there is nothing to verify. For a finished run, "
            f"write it with: tacit report {folder}"
        )
    text = read_text(file)
    certificate: dict[str, Any] = {}  # Any: JSON values
    try:
        found = parse_json(text, name=file.name)
        certificate = found if isinstance(found, dict) else {}
        problems = verify_run(folder) if is_run else verify(found, folder=folder)
    except ValueError as wrong:
        problems = [Problem(file.name, str(wrong))]
    if place.is_dir() and not is_run:
        missing = "does not exist, so this is no finished run; name a certificate file to check it"
        problems.append(Problem("facts.json", f"{missing} alone"))
    beside = file.with_suffix(".sig")
    signer = None
    if beside.is_file():
        signer, wrong = _signer(beside, text, certificate.get("issuer"), trusted)
        problems += [] if wrong is None else [Problem(beside.name, wrong)]
    elif trusted is not None:
        problems.append(Problem(beside.name, "does not exist: the certificate is not signed"))
    elif certificate.get("issuer") is not None:
        problems.append(Problem("issuer", "is named, but the certificate is not signed"))
    word = REFUTED if problems else (AUTHENTICATED if trusted is not None else CONSISTENT)
    return Verdict(word, problems, certificate, signer if not problems else None)


def fingerprint(public: bytes) -> str:
    """Return a short name of a public key: the start of its SHA-256, to compare by eye."""
    return hashlib.sha256(public).hexdigest()[:32]


def _signer(
    file: Path, text: str, issuer: object, trusted: "Ed25519PublicKey | None"
) -> tuple[str | None, str | None]:
    """Return the fingerprint of the key that signed `text`, and what is wrong with the signature.

    One of the two is None.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        found = read_json(file)
        if not isinstance(found, dict) or set(found) != _FIELDS:
            raise ValueError
        stated = (found["format"], found["version"], found["algorithm"])
        if stated != (FORMAT, VERSION, "Ed25519"):
            raise ValueError
        public, signature = bytes.fromhex(found["public_key"]), bytes.fromhex(found["signature"])
        holder = Ed25519PublicKey.from_public_bytes(public)
    except (ValueError, TypeError):
        return None, "is not a signature of tacit"
    if trusted is not None and _raw(trusted) != public:
        return None, "was made with another key than the given one"
    if not issuer or found["issuer"] != issuer:
        return None, "names another issuer than the certificate"
    try:
        holder.verify(signature, _CONTEXT + text.encode())
    except InvalidSignature:
        return None, "is not the signature of this certificate"
    return fingerprint(public), None


def _private_key(path: Path) -> "Ed25519PrivateKey":
    """Read an Ed25519 private key in PEM or OpenSSH format, without a passphrase."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    raw = path.read_bytes()
    is_ssh = b"OPENSSH PRIVATE KEY" in raw
    load = serialization.load_ssh_private_key if is_ssh else serialization.load_pem_private_key
    try:
        key = load(raw, password=None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{path} must be an Ed25519 private key (PEM or OpenSSH), not encrypted.")
    return key


def _public_key(path: Path) -> "Ed25519PublicKey":
    """Read an Ed25519 public key in PEM or OpenSSH format."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    raw = path.read_bytes()
    is_ssh = raw.startswith(b"ssh-")
    load = serialization.load_ssh_public_key if is_ssh else serialization.load_pem_public_key
    try:
        key = load(raw)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(f"{path} must be an Ed25519 public key (PEM or OpenSSH).")
    return key


def _raw(public: "Ed25519PublicKey") -> bytes:
    from cryptography.hazmat.primitives import serialization

    return public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


def _public_file(private: Path) -> Path:
    return private.with_name(private.name + ".pub")

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
from tacit.errors import LedgerError
from tacit.experiments import RunFolder
from tacit.report.certificate import Problem, seal, verify
from tacit.report.run_certificate import CERTIFICATE, check_payments, verify_run

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

AUTHENTICATED = "authenticated"
CONSISTENT = "consistent, not authenticated"
REFUTED = "does not verify"
INCOMPLETE = "incomplete"
FORMAT, VERSION = "tacit signature", 1
_CONTEXT = b"tacit certificate signature, version 1\n"  # no other use of a key signs such bytes
_FIELDS = {"format", "version", "algorithm", "issuer", "public_key", "signature"}


class Verdict(NamedTuple):
    """The answer to whether a certificate can be relied on."""

    word: str
    """`AUTHENTICATED`, `CONSISTENT`, `INCOMPLETE` or `REFUTED`."""
    problems: list[Problem]
    """What contradicts the certificate: it does not verify unless the list is empty."""
    certificate: dict[str, Any]  # Any: JSON values
    """The certificate that was read; empty if it cannot be read."""
    key: str | None
    """Fingerprint of the key that signed it, if the signature is right."""
    unchecked: list[Problem]
    """What could not be checked, because a file is missing: incomplete unless the list is empty."""


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
    """Sign the certificate in a run folder, or that file alone; return the key's fingerprint.

    The certificate is verified first, in a run folder by deriving it again: `ValueError` if
    anything contradicts it or is missing. Then `issuer` is entered into it, and the signature is
    written beside it: certificate.sig.
    """
    if not issuer.strip():
        raise ValueError("issuer must name who vouches for the certificate.")
    place, private = _Place.of(folder), _private_key(Path(key))
    problems = place.problems(None if place.is_run else read_json(place.file))
    if problems:
        first = problems[0]
        raise ValueError(
            f"{folder} is not signed, because it does not verify: {first.field} {first.what}."
        )
    certificate = read_json(place.file)
    place.signature.unlink(missing_ok=True)  # never a signature beside another certificate
    body = {name: v for name, v in certificate.items() if name != "seal"} | {"issuer": issuer}
    text = json.dumps(body | {"seal": seal(body)}, indent=2) + "\n"
    write = RunFolder(place.file.parent).write
    write(place.file.name, text)
    public = _raw(private.public_key())
    signature = {
        "format": FORMAT,
        "version": VERSION,
        "algorithm": "Ed25519",
        "issuer": issuer,
        "public_key": public.hex(),
        "signature": private.sign(_CONTEXT + text.encode()).hex(),
    }
    write(place.signature.name, json.dumps(signature, indent=2) + "\n")
    return fingerprint(public)


def judge(
    path: str | Path, *, key: str | Path | None = None, ledger: str | Path | None = None
) -> Verdict:
    """Return whether a run folder or a certificate file can be relied on, and why not.

    In a run folder the certificate is derived again from the other files. For a file without a run
    beside it, prices are computed again and the model file is compared with its hash. With `key`, a
    public key that the reader trusts, the certificate must have a signature by that key. Without
    it the best answer is `CONSISTENT`: whoever can write all files can forge them consistently.
    If nothing contradicts the certificate but a file is missing, such as the ledger that paid, the
    answer is `INCOMPLETE`. `ledger` says where that ledger, or a copy of it, is.
    """
    place, trusted = _Place.of(path), None if key is None else _public_key(Path(key))
    if ledger is not None and not Path(ledger).is_file():
        raise LedgerError(f"there is no ledger at {ledger}.")
    if not place.file.is_file():
        raise FileNotFoundError(
            f"{place.file.parent} holds no {place.file.name}, so there is nothing to verify. For a "
            f"finished run, write it with: tacit report {place.file.parent}"
        )
    text = read_text(place.file)
    certificate: dict[str, Any] = {}  # Any: JSON values
    try:
        found = parse_json(text, name=place.file.name)
        certificate = found if isinstance(found, dict) else {}
        problems = place.problems(found, ledger=ledger)
    except ValueError as wrong:
        problems = [Problem(place.file.name, str(wrong))]
    beside, signer = place.signature, None
    if beside.is_file():
        signer, wrong = _signer(beside, text, certificate.get("issuer"), trusted)
        problems += [] if wrong is None else [Problem(beside.name, wrong)]
    elif trusted is not None:
        problems.append(Problem(beside.name, "does not exist: the certificate is not signed"))
    elif certificate.get("issuer") is not None:
        problems.append(Problem("issuer", "is named, but the certificate is not signed"))
    unchecked = [one for one in problems if one.is_missing]
    problems = [one for one in problems if not one.is_missing]
    word = INCOMPLETE if unchecked else (CONSISTENT if trusted is None else AUTHENTICATED)
    signer = None if problems else signer
    return Verdict(REFUTED if problems else word, problems, certificate, signer, unchecked)


class _Place(NamedTuple):
    """Where a certificate is: in the folder of a finished run, or a file of its own."""

    file: Path
    is_folder: bool
    is_run: bool

    @classmethod
    def of(cls, path: str | Path) -> "_Place":
        """Return the place that `path` names: a folder, or a certificate file."""
        given = Path(path)
        file = given / CERTIFICATE if given.is_dir() else given
        is_run = file.name == CERTIFICATE and RunFolder(file.parent).is_finished
        return cls(file, given.is_dir(), is_run)

    @property
    def signature(self) -> Path:
        return self.file.with_suffix(".sig")

    def problems(
        self, certificate: Any, *, ledger: str | Path | None = None
    ) -> list[Problem]:  # Any: JSON values
        """Return what contradicts the certificate or is missing, signatures aside."""
        if self.is_run:
            return verify_run(self.file.parent, ledger=ledger)
        found = verify(certificate, folder=self.file.parent)
        if self.is_folder:
            no_run = "does not exist, so this is no finished run; name a certificate file to check"
            found.append(Problem("facts.json", f"{no_run} it alone"))
        if ledger is not None and not any(not one.is_missing for one in found):
            found += check_payments(certificate, ledger)
        return found


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

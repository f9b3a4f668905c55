"""The certificate: everything that anyone needs to recompute a claim of privacy, as JSON.

A certificate states the events of a run, so that its reader can price them. `verify` computes every
epsilon again from the events alone, compares the model file with its hash, and checks the seal,
which is a hash of all other fields. The seal reveals accidental edits, but it is not a signature:
whoever edits a certificate on purpose can compute the seal again. Such an edit cannot lower epsilon
unless it changes the events too, because prices are recomputed from the events. In a run folder,
`tacit.report.run_certificate` derives the whole certificate again; `tacit.report.signature` says
who vouches for it.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from tacit import __version__, accounting, events
from tacit.errors import TacitError, UnsupportedEvent
from tacit.events import Event, Relation
from tacit.experiments import file_hash

FORMAT, VERSION = "tacit certificate", 2
GROUPS = (2, 4, 10)
"""Numbers of records of one person for which a claim about one record states epsilon too."""
TOLERANCE = 1e-6  # relative; other versions of numpy and scipy may differ in the last digits

CONTEXT = (
    "data_commitment",
    "ledger",
    "records_per_person",
    "tuning",
    "adversary",
    "recipe_sha256",
    "files",
    "package",
    "audit",
    "isolation",
    "generator",
    "arithmetic",
)
"""What the claim rests on, beside the events; docs/certificate.md explains each."""

ACCOUNTANTS: dict[str, Callable[[], Any]] = {  # Any: classes that load on first use
    "PLD": lambda: accounting.PLD(),
    "RDP": lambda: accounting.RDP(),
    "moments (2016)": lambda: accounting.Moments(),
    "strong composition": lambda: accounting.StrongComposition(),
}


class Problem(NamedTuple):
    """One reason why a certificate does not hold, or could not be checked in full."""

    field: str
    what: str
    is_missing: bool = False
    """Whether a file is absent, so that something was not checked; nothing contradicts the rest."""


def prices(
    event: Event, *, delta: float, relation: Relation, version: str = __version__
) -> list[dict[str, Any]]:
    """Return the epsilon of `event` by every accountant that can price it, and a lower bound.

    `version` is the version of tacit that is stated beside each price.
    """
    found = _by_accountant(event, delta, relation)
    return [{"accountant": name, "version": version} | values for name, values in found.items()]


@lru_cache(maxsize=4)  # a verification prices the event of a run several times
def price(event: Event, delta: float, relation: Relation) -> float:
    """Return the epsilon that is claimed for `event`: the smallest certified upper bound."""
    return accounting.epsilon(event, delta=delta, relation=relation)


@lru_cache(maxsize=16)
def group_claim(event: Event, records: int, delta: float, relation: Relation) -> dict[str, Any]:
    """Return what is claimed of `event` for a person with `records` records, as JSON values.

    It is priced as what so many records do to each release, not as a multiple of the epsilon of one
    record; where that is not known exactly, it is an upper bound. Epsilon is None if no finite one
    is known.
    """
    found = accounting.group_price(event, records=records, delta=delta, relation=relation)
    return {
        "records": records,
        "epsilon": found.epsilon if math.isfinite(found.epsilon) else None,
        "price": "exact" if found.is_exact else "upper bound",
    }


@lru_cache(maxsize=4)
def _by_accountant(event: Event, delta: float, relation: Relation) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name, make in ACCOUNTANTS.items():
        try:
            if name == "PLD":
                bracket = make().bracket(event, delta=delta, relation=relation)
                values = {"epsilon": bracket.upper, "lower": bracket.lower}
            else:
                values = {"epsilon": make().epsilon(event, delta=delta, relation=relation)}
        except UnsupportedEvent:
            continue
        if math.isfinite(values["epsilon"]):
            found[name] = values
    return found


def make_certificate(
    *,
    event: Event,
    delta: float,
    relation: Relation,
    unit: str,
    n_records: int,
    sampling_used: str,
    data_touches: list[dict[str, str]],
    released: list[str],
    randomness: str,
    utility: dict[str, Any],
    software: dict[str, str],
    created: str,
    title: str,
    model: Path | None = None,
    context: Mapping[str, Any] | None = None,
    issuer: str | None = None,
    groups: Iterable[int] = GROUPS,
) -> dict[str, Any]:
    """Return the sealed certificate of a run that did `event` to its records, as JSON values.

    Its epsilon is a certified upper bound at `delta`. `context` has the fields of `context` in
    the JSON Schema that are known; the others are null. `issuer` names who vouches for the
    certificate. If the unit is a record, the claim also states epsilon for a person with so many
    records as `groups` lists.
    """
    epsilon = price(event, delta, relation)
    of_groups = [
        dict(group_claim(event, k, delta, relation)) for k in (groups if unit == "record" else ())
    ]
    body = {
        "format": FORMAT,
        "version": VERSION,
        "title": title,
        "created": created,
        "claim": {
            "epsilon": epsilon if math.isfinite(epsilon) else None,
            "delta": delta,
            "relation": str(relation),
            "unit": unit,
            "groups": of_groups,
            "n_records_assumed_public": n_records,
            "events": event.to_dict(),
            "sampling": {"assumed": str(event), "used": sampling_used},
            "data_touches": data_touches,
            "released": released,
            "randomness": randomness,
        },
        "prices": prices(
            event, delta=delta, relation=relation, version=software.get("tacit", __version__)
        ),
        "utility": utility,
        "model": None if model is None else {"file": model.name, "sha256": file_hash(model)},
        "software": software,
        "context": dict.fromkeys(CONTEXT) | dict(context or {}),
        "issuer": issuer,
    }
    return body | {"seal": seal(body)}


def verify(certificate: Mapping[str, Any], *, folder: Path | None = None) -> list[Problem]:
    """Return every reason why the certificate does not hold; the list is empty if it holds.

    `folder` is where the model file is; if it is None, the model file is not checked. A model file
    that is not there is a problem with `is_missing`.
    """
    malformed = list(_schema_problems(certificate))
    if malformed:
        return malformed
    body = {name: value for name, value in certificate.items() if name != "seal"}
    try:
        is_sealed = seal(body) == certificate["seal"]
    except (ValueError, RecursionError):  # NaN or infinity, which `make_certificate` never writes
        is_sealed = False
    found = [] if is_sealed else [Problem("seal", "a field was edited")]
    return [*found, *_price_problems(certificate), *_model_problems(certificate, folder)]


def seal(body: Mapping[str, Any]) -> str:
    """Return the hash of all fields except the seal itself, written as canonical JSON."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def schema() -> dict[str, Any]:
    """Return the JSON Schema of certificates."""
    file = resources.files("tacit.report") / "certificate.schema.json"
    return json.loads(file.read_text(encoding="utf-8"))


def _schema_problems(certificate: Mapping[str, Any]) -> Iterator[Problem]:
    from jsonschema import Draft202012Validator

    for error in Draft202012Validator(schema()).iter_errors(certificate):
        field = ".".join(str(part) for part in error.absolute_path) or "certificate"
        yield Problem(field, error.message.splitlines()[0][:200])


def _price_problems(certificate: Mapping[str, Any]) -> Iterator[Problem]:
    claim = certificate["claim"]
    try:
        event = events.from_dict(claim["events"])
        relation = Relation(claim["relation"])
        epsilon = price(event, claim["delta"], relation)
        again = prices(event, delta=claim["delta"], relation=relation)
    except (ValueError, TypeError, ArithmeticError, RecursionError, TacitError) as wrong:
        yield Problem("claim.events", f"cannot be priced: {wrong}")
        return
    stated = math.inf if claim["epsilon"] is None else claim["epsilon"]
    if not is_close(stated, epsilon):
        yield Problem("claim.epsilon", f"the events cost {epsilon:.6g}, not {stated:.6g}")
        return  # other prices of these events say no more
    for group in claim["groups"]:
        if not _is_same_group(
            group, group_claim(event, group["records"], claim["delta"], relation)
        ):
            k = group["records"]
            yield Problem("claim.groups", f"the epsilon for {k} records is another one")
    if claim["unit"] != "record" and claim["groups"]:
        yield Problem("claim.groups", "must be empty unless the unit is a record")
    if set(certificate["context"]) != set(CONTEXT):
        yield Problem("context", f"must have {', '.join(CONTEXT)}")
    if claim["sampling"]["assumed"] != str(event):
        yield Problem("claim.sampling.assumed", "does not describe the events")
    before = {entry["accountant"]: entry for entry in certificate["prices"]}
    after = {entry["accountant"]: entry for entry in again}
    if sorted(entry["accountant"] for entry in certificate["prices"]) != sorted(after):
        yield Problem("prices", f"must be those of {', '.join(after)}, once each")
    for name in before.keys() & after.keys():
        for field in ("epsilon", "lower"):
            if not is_close(before[name].get(field, 0.0), after[name].get(field, 0.0)):
                yield Problem(
                    f"prices.{name}.{field}", f"is {after[name][field]:.6g} when computed again"
                )


def _is_same_group(stated: Mapping[str, Any], again: Mapping[str, Any]) -> bool:
    """Return whether a group's claim holds.

    An upper bound also holds if it is larger than the one that is known now.
    """
    first, now = (math.inf if o["epsilon"] is None else o["epsilon"] for o in (stated, again))
    is_looser = again["price"] == "upper bound" and first > now
    return stated["price"] == again["price"] and (is_looser or is_close(first, now))


def _model_problems(certificate: Mapping[str, Any], folder: Path | None) -> Iterator[Problem]:
    model = certificate["model"]
    if model is None or folder is None:
        return
    path = folder / Path(model["file"]).name  # the name alone, so it stays inside the folder
    if not path.is_file():
        yield Problem("model.file", f"{path.name} does not exist", is_missing=True)
    elif file_hash(path) != model["sha256"]:
        yield Problem("model.sha256", "the file has another hash")


def is_close(stated: float, computed: float) -> bool:
    """Return whether two numbers agree up to rounding."""
    if math.isinf(stated) or math.isinf(computed):
        return stated == computed
    return abs(stated - computed) <= TOLERANCE * max(abs(stated), abs(computed), 1e-12)

"""The certificate of a run folder, derived from ledger, recipe, facts and model; never just read.

The parts of a folder vouch for each other. The last row that a run adds to its ledger holds the
hashes of model, recipe and facts. The facts hold the hash of that row and the hashes of the other
files. The certificate is a function of the facts and the audit. So no part can be edited or
exchanged alone. Whoever rewrites all of them consistently is found out only by a signature
(`tacit.report.signature`).
"""

import json
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from tacit import accounting
from tacit._untrusted import printable, read_json
from tacit.datasets import Schema
from tacit.errors import TacitError
from tacit.events import Event, Relation, Sequence, from_dict
from tacit.experiments import (
    AUDIT,
    FACTS,
    RECIPE,
    Facts,
    Recipe,
    RunFolder,
    file_hash,
    ledger_state,
    seal_of,
)
from tacit.ledger import Entry, Ledger, server_address
from tacit.report.certificate import Problem, is_close, make_certificate, price, verify

CERTIFICATE, SIGNATURE = "certificate.json", "certificate.sig"
_PRICES = (
    "claim.epsilon",
    "claim.groups.",
    "prices.",
    "context.ledger.epsilon.",
    "facts.ledger_state.epsilon.",
)
"""Values that accountants compute; they may differ in the last digits between machines."""
_OPTIONAL = {  # field of the certificate's context: field of the facts, if they have it
    "data_commitment": "data_fingerprint",
    "isolation": "isolation",
    "generator": "generator",
    "arithmetic": "arithmetic",
}
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError)
"""Errors that hostile facts can cause, where they hold other kinds of values than a run writes."""
_GIVE_LEDGER = "Get it from whoever made the run, and give it with --ledger FILE"
_MOST_SHOWN = 200  # characters of a message
_MOST_HEADER = 16 * 2**20  # bytes


def certificate_of(
    facts: Facts, run: RunFolder, *, issuer: str | None = None
) -> dict[str, Any]:  # Any: JSON values
    """Return the sealed certificate of a finished run, made from its facts and its audit."""
    utility = facts.utility
    return make_certificate(
        title=f"{facts.method} on {facts.data}",
        event=facts.claim,
        delta=facts.delta,
        relation=Relation(facts.relation),
        unit=facts.unit,
        n_records=facts.n_records,
        sampling_used=facts.sampling_used,
        data_touches=[
            {"what": f"{touch.what}: {touch.how}", "paid": touch.cost} for touch in facts.touches
        ],
        released=list(facts.released),
        randomness=randomness_of(facts),
        utility={
            "metric": utility.metric,
            "private": [one.value for one in utility.private],
            "mean": utility.mean,
            "spread": utility.spread,
            "non_private": [one.value for one in utility.non_private],
            "majority": utility.majority,
            "n_test": utility.n_test,
            "intervals": {name: list(ends) for name, ends in utility.intervals.items()},
        },
        software=facts.versions,
        created=facts.created,
        model=run / facts.model_file,
        context=_context(facts, run),
        issuer=issuer,
    )


def randomness_of(facts: Facts) -> str:
    """Return words for the source of the run's noise."""
    if isinstance(facts.seed, int):
        return f"seed {facts.seed}: the noise is reproducible"
    return "OS entropy"


def write_certificate(run: RunFolder) -> dict[str, Any]:  # Any: JSON values
    """Write the certificate of a finished run, and return it.

    Raises `ValueError`, with nothing written, if the parts of the folder do not belong together. A
    signed certificate that still says the same is left as it is; one that no longer does is
    replaced, and its signature is removed with a warning.
    """
    facts = run.facts()  # raises its own error if there is no finished run
    _require_none(run, [*check_run(run), *_audit_problems(run)])
    certificate = certificate_of(facts, run)
    if (run / SIGNATURE).is_file() and (run / CERTIFICATE).is_file():
        stored = read_json(run / CERTIFICATE)
        issued = _with_groups_of(stored, certificate_of(facts, run, issuer=_issuer(stored)))
        if not list(_differences(stored, issued)):
            return stored
        (run / SIGNATURE).unlink()
        warnings.warn(
            f"the certificate has changed, so {SIGNATURE} was removed. Sign it again: tacit sign "
            f"{run.path}",
            stacklevel=2,
        )
    run.write(CERTIFICATE, json.dumps(certificate, indent=2) + "\n")
    return certificate


def _with_groups_of(stored: Any, derived: dict[str, Any]) -> dict[str, Any]:  # Any: JSON values
    """Return `derived` with the stored prices of the same groups: `verify` checks them."""
    claim = stored.get("claim", {}) if isinstance(stored, Mapping) else {}
    sizes = [
        [group.get("records") for group in one.get("groups", ())]
        for one in (claim, derived["claim"])
    ]
    if sizes[0] != sizes[1] or verify(stored):
        return derived
    return {**derived, "claim": {**derived["claim"], "groups": claim["groups"]}}


def require_consistent(run: RunFolder) -> None:
    """Raise `ValueError` if ledger, recipe, facts, model and other files disagree."""
    run.facts()  # raises its own error if there is no finished run
    _require_none(run, check_run(run))


def _require_none(run: RunFolder, problems: list[Problem]) -> None:
    if problems:
        listed = "; ".join(f"{problem.field}: {problem.what}" for problem in problems[:5])
        raise ValueError(f"{run.path} gets no certificate, because its parts disagree: {listed}.")


def verify_run(folder: str | Path, *, ledger: str | Path | None = None) -> list[Problem]:
    """Return every reason why the certificate in a run folder is not that of the run.

    The certificate is derived again from ledger, recipe, facts and model, and every stored hash is
    computed again. An empty list means that the folder is consistent, not that it is authentic.
    `ledger` is the ledger file that paid, or a copy of it; by default it is looked for in the
    folder and where the run found it. What is absent is a problem with `is_missing`.
    """
    run = RunFolder(folder)
    problems = [*check_run(run, ledger=ledger), *_audit_problems(run)]
    if not (run / CERTIFICATE).is_file():
        what = "does not exist; write it with tacit report"
        return [*problems, Problem(CERTIFICATE, what, is_missing=True)]
    try:
        stored = read_json(run / CERTIFICATE)
        facts = run.facts()
    except (ValueError, OSError) as wrong:
        return [*problems, Problem(CERTIFICATE, _shown(wrong))]
    problems += verify(stored, folder=run.path)
    if any(not one.is_missing for one in problems) or not (run / facts.model_file).is_file():
        return problems
    issuer = _issuer(stored) if (run / SIGNATURE).is_file() else None
    try:
        derived = certificate_of(facts, run, issuer=issuer)
        derived = _with_groups_of(stored, derived | {"seal": stored["seal"]})  # checked above
        return [*problems, *_differences(stored, derived)]
    except _MALFORMED:
        return [*problems, Problem("facts.json", "is not what a run writes")]


def check_payments(certificate: Mapping[str, Any], place: str | Path) -> list[Problem]:
    """Return every reason why the ledger file at `place` did not pay for what `certificate` claims.

    It is for a certificate without a run folder, which `verify` found to hold by itself.
    """
    claim, stated = certificate["claim"], (certificate.get("context") or {}).get("ledger")
    if stated is None:
        return [Problem("context.ledger", "is not stated, so no ledger can be compared with it")]
    try:
        with Ledger(place, read_only=True) as ledger:
            ledger.verify(head=stated["head"], ask_witness=False)
            if (ledger.unit, str(ledger.relation)) != (claim["unit"], claim["relation"]):
                return [Problem("ledger", "has another unit or relation than the claim")]
            event, delta = from_dict(claim["events"]), claim["delta"]
            return list(_state_problems(ledger, event, delta, stated, "context.ledger"))
    except (TacitError, OSError) as wrong:
        return [Problem("ledger", _shown(wrong))]
    except _MALFORMED:
        return [Problem("context.ledger", "is not what a run writes")]


def check_run(run: RunFolder, *, ledger: str | Path | None = None) -> list[Problem]:
    """Return every reason why ledger, recipe, facts, model and other files do not fit together.

    `ledger` is as for `verify_run`.
    """
    try:
        facts = run.facts()
    except (ValueError, OSError) as wrong:
        return [Problem("facts.json", _shown(wrong))]
    problems = list(_file_problems(run, facts))
    if not problems:
        problems += [*_facts_problems(facts), *_recipe_problems(run, facts)]
    return [*problems, *_payment_problems(run, facts, ledger)]


def _payment_problems(run: RunFolder, facts: Facts, given: str | Path | None) -> list[Problem]:
    """Return every reason why the ledger, `given` or found, did not pay for the run."""
    place, stated = run.find_ledger(facts, given), Path(facts.ledger_file)
    name = printable(stated.name)
    if place is None:
        what = f"there is no ledger {name} here, so nothing was compared with it. {_GIVE_LEDGER}"
        return [Problem("ledger", what, is_missing=True)]
    is_outside = stated.is_absolute() and not stated.is_relative_to(run.path.resolve())
    is_mine = given is not None or (is_outside and place == stated)
    if not is_mine and server_address(place) is not None:  # the address is the sender's choice
        what = f"{name} names a server, which was not asked. {_GIVE_LEDGER}"
        return [Problem("ledger", what, is_missing=True)]
    try:
        with Ledger(place, read_only=True) as ledger:
            return list(_ledger_problems(ledger, facts, seal_of(read_json(run / FACTS))))
    except (TacitError, OSError) as wrong:
        return [Problem(name, _shown(wrong))]
    except _MALFORMED:
        return [Problem("facts.ledger_state", "is not what a run writes")]


def _context(facts: Facts, run: RunFolder) -> dict[str, Any]:  # Any: JSON values
    audit, state = run / AUDIT, facts.ledger_state
    given = {name: getattr(facts, field, None) for name, field in _OPTIONAL.items()}
    found: dict[str, Any] = {
        name: value for name, value in given.items() if value not in (None, "")
    }
    found |= {
        "records_per_person": facts.records_per_person,
        "tuning": _tuning(facts),
        "adversary": facts.adversary,
        "recipe_sha256": facts.recipe_sha256 or None,
        "files": facts.files,
    }
    if state:
        found["ledger"] = {**state, "head": facts.ledger_head}
    if facts.package_sha256:
        version = facts.versions.get("tacit", "")
        found["package"] = {"version": version, "sha256": facts.package_sha256}
    if audit.is_file():
        passes = read_json(audit).get("passes")
        found["audit"] = {"sha256": file_hash(audit), "passes": bool(passes)}
    return found


def _tuning(facts: Facts) -> str:
    """Return what the choice of settings cost, or that nothing was paid for it."""
    chosen = [t for t in facts.touches if t.what in ("model selection", "early stopping")]
    if not chosen:
        return "none was paid: no setting was chosen by results on the private records in this run"
    return "; ".join(f"{touch.what} ({touch.cost}): {touch.how}" for touch in chosen)


def _file_problems(run: RunFolder, facts: Facts) -> Iterator[Problem]:
    stored = {facts.model_file: facts.model_sha256, facts.recipe_file: facts.recipe_sha256}
    for name, expected in (stored | facts.files).items():
        path = run / Path(name).name  # the name alone, so it stays inside the folder
        if not path.is_file():
            yield Problem(name, "does not exist", is_missing=True)
        elif file_hash(path) != expected:
            yield Problem(name, "is not the file of this run: it has another hash")
    named = {facts.metrics_file, facts.baseline_file} - {None, ""}
    for name in sorted(named - set(facts.files)):
        yield Problem(str(name), "has no hash in the facts")


def _audit_problems(run: RunFolder) -> Iterator[Problem]:
    """Yield a problem if the audit in a folder is not one of the folder's model."""
    if not (run / AUDIT).is_file():
        return
    try:
        facts, audit = run.facts(), read_json(run / AUDIT)
    except (ValueError, OSError) as wrong:
        yield Problem(AUDIT, _shown(wrong))
        return
    stated = audit.get("model_sha256") if isinstance(audit, dict) else None
    if stated != facts.model_sha256:
        yield Problem(AUDIT, "is not an audit of this model; run tacit audit again")


def _facts_problems(facts: Facts) -> Iterator[Problem]:
    relation = Relation(facts.relation)
    try:
        epsilon = price(facts.claim, facts.delta, relation)
    except (ValueError, TypeError, ArithmeticError, RecursionError, TacitError) as wrong:
        yield Problem("facts.event", f"cannot be priced: {_shown(wrong)}")
        return
    if not is_close(facts.epsilon, epsilon):
        yield Problem("facts.epsilon", f"the event costs {epsilon:.6g}, not {facts.epsilon:.6g}")


def _recipe_problems(run: RunFolder, facts: Facts) -> Iterator[Problem]:
    """Yield a problem for each setting of the recipe that the facts or the model contradict."""
    if not (run / RECIPE).is_file():
        return
    try:
        text = (run / RECIPE).read_text(encoding="utf-8")
        recipe = Recipe.parse(text, trust_code=[_module_in(text)])  # nothing is imported here
        header = _recipe_in(run / facts.model_file)
    except (*_MALFORMED, OSError) as wrong:
        yield Problem(RECIPE, _shown(wrong))
        return
    if header is not None and header != text:
        yield Problem(facts.model_file, "holds another recipe")
    privacy = recipe.privacy
    if privacy.delta and privacy.delta != facts.delta:  # a pure guarantee is stated at any delta
        yield Problem("facts.delta", "is not that of the recipe")
    if facts.unit != "record" and not _names_persons(recipe):
        yield Problem("facts.unit", "is not a record, but no column of the data names persons")
    trained = {"dp-sgd": "training", "finetune": "finetune"}.get(recipe.method)
    if trained is not None:
        for name, value in recipe.to_dict().get(trained, {}).items():
            stated = facts.hyperparameters.get(name)
            asked = list(value) if isinstance(value, tuple) else value
            if name == "bands" and isinstance(asked, int) and stated != asked:
                asked = min(asked, facts.steps)  # a run of fewer steps uses fewer bands
            if stated != asked:
                yield Problem(f"facts.hyperparameters.{name}", "is not that of the recipe")


def _names_persons(recipe: Recipe) -> bool:
    """Return whether the data of a recipe has a column that names persons."""
    if recipe.method == "finetune":
        return bool(recipe.text.person)
    if recipe.data.name != "table":
        return False
    try:
        return Schema.from_dict(recipe.data.schema).unit == "person"
    except _MALFORMED:
        return False


def _module_in(text: str) -> str:
    """Return the package of the module that a recipe names, to read the recipe as mere data."""
    import tomllib

    try:
        module = tomllib.loads(text).get("model", {}).get("module", "")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return module.partition(":")[0] if isinstance(module, str) else ""


def _recipe_in(model: Path) -> str | None:
    """Return the recipe in the header of a safetensors file, or None for other files."""
    if model.suffix != ".safetensors":
        return None
    with model.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > _MOST_HEADER:
            raise ValueError("its header is too large")
        header = json.loads(stream.read(size))
    return json.loads(header["__metadata__"]["tacit"])["recipe"]


def _ledger_problems(
    ledger: Ledger, facts: Facts, expected: Mapping[str, Any]
) -> Iterator[Problem]:  # Any: JSON values
    name = Path(facts.ledger_file).name
    ledger.verify(head=facts.ledger_head, ask_witness=False)  # its address is a stranger's
    if (ledger.unit, str(ledger.relation)) != (facts.unit, facts.relation):
        yield Problem(name, "has another unit or relation than the facts")
    sealed = [json.loads(note) for _, row, note in ledger.seals() if row == facts.ledger_head]
    if sealed != [expected]:
        yield Problem(name, "its row for this run does not hold the hashes of these files")
        return
    state = {**facts.ledger_state, "head": facts.ledger_head}
    yield from _state_problems(ledger, facts.claim, facts.delta, state, "facts.ledger_state")


def _state_problems(
    ledger: Ledger, claim: Event, delta: float, stated: Mapping[str, Any], path: str
) -> Iterator[Problem]:  # Any: JSON values
    """Yield a problem if the ledger was not in the `stated` state, or `claim` leaves out payments.

    `path` is the field that has the state.
    """
    head, own = stated["head"], stated["entries_of_run"]
    paid = [entry for entry in ledger.history(head=head) if entry.id in own]
    if not own or set(own) - {entry.id for entry in paid}:
        yield Problem("ledger", "does not hold the payments of this run")
    elif not _is_covered(paid, claim):
        yield Problem(path, "names a payment that the events of the claim leave out")
    again = ledger_state(ledger, delta=delta, head=head, own=own)
    yield from _differences(stated, {**again, "head": head}, path)


def _is_covered(paid: list[Entry], claimed: Event) -> bool:
    """Return whether the claim contains each payment at least as often as it was made.

    A person is in one partition of the ledger, so each partition must be covered by itself.
    """
    claim = Counter(accounting.flatten(claimed))
    for name in {name for entry in paid for name in entry.partitions} or {""}:
        read = [e.event for e in paid if not e.partitions or name in e.partitions]
        if not Counter(accounting.flatten(Sequence(tuple(read)))) <= claim:
            return False
    return True


def _differences(old: Any, derived: Any, path: str = "") -> Iterator[Problem]:  # Any: JSON
    """Yield a problem for each value that differs; computed prices may differ by rounding."""
    at = path or "certificate"
    if isinstance(old, Mapping) and isinstance(derived, Mapping):
        for name in sorted(set(old) | set(derived)):
            where = f"{path}.{name}" if path else name
            if name in old and name in derived:
                yield from _differences(old[name], derived[name], where)
            elif name not in derived:
                yield Problem(where, "is not part of the run")
            else:
                yield Problem(where, "is missing")
    elif isinstance(old, list) and isinstance(derived, list | tuple) and len(old) == len(derived):
        for index, (one, other) in enumerate(zip(old, derived, strict=True)):
            yield from _differences(one, other, f"{at}.{index}")
    elif path.startswith(_PRICES) and _is_number(old) and _is_number(derived):
        if not is_close(float(old), float(derived)):
            yield Problem(at, "is another number when it is derived again")
    elif old != derived or isinstance(old, bool) != isinstance(derived, bool):
        yield Problem(at, "differs from what the run folder says")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _issuer(certificate: Any) -> str | None:  # Any: JSON values
    issuer = certificate.get("issuer") if isinstance(certificate, Mapping) else None
    return issuer if isinstance(issuer, str) else None


def _shown(wrong: Exception) -> str:
    return printable(str(wrong))[:_MOST_SHOWN]

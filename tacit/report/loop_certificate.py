"""The certificate of a training loop of one's own, which has no run folder.

`certify` states what a run of `make_private` did: everything comes from the run and its ledger. The
run does not know what else its program did with the records, so the certificate says null for
tuning, and lists no evaluation. Releases that were announced to `make_private` as `also` are part
of the claim.
"""

import json
import math
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit import __version__
from tacit.experiments import ADVERSARY, RunFolder, ledger_state, package_hash, versions
from tacit.report.certificate import make_certificate

if TYPE_CHECKING:
    from tacit.training import Private


def certify(
    private: "Private",
    path: str | Path,
    *,
    title: str,
    delta: float,
    model: str | Path | None = None,
    released: Iterable[str] = ("the weights after every step",),
) -> dict[str, Any]:  # Any: JSON values
    """Write the certificate of a private run to the file `path`, and return it.

    Guarantee: the claim is `private.event`, with lost steps that were paid again, priced at `delta`
    under the ledger's relation and unit. `tacit verify PATH` computes it again; with `--ledger` it
    also finds the payments in the ledger. `tacit sign PATH` signs it.

    Call this on one rank, after the last step. A run that was stopped early has paid for its whole
    plan, and this is what its certificate states.

    Parameters
    ----------
    title
        What was trained on which data, in words.
    model
        File with the released weights, in the folder of `path`; its hash becomes part of the claim.
    released
        Everything that leaves the program, in words.

    Raises
    ------
    ValueError
        If no step was taken, or if the run has no guarantee, as without noise.
    """
    file, weights = Path(path), None if model is None else Path(model)
    if weights is not None and weights.resolve().parent != file.resolve().parent:
        raise ValueError(
            "model must be in the folder of the certificate, so that both stay together."
        )
    if not private.steps_taken:
        raise ValueError("the run has taken no step, so there is nothing to certify yet.")
    private.require_unchanged()
    if math.isinf(private.epsilon(delta=delta)):
        raise ValueError(
            f"the run has no guarantee, so it gets no certificate. Its event: {private.event}."
        )
    ledger = private.ledger
    certificate = make_certificate(
        title=title,
        event=private.event,
        delta=delta,
        relation=ledger.relation,
        unit=ledger.unit,
        n_records=private.info["n_records"],
        sampling_used=f"lots drawn as the event states: {private.training_event}",
        data_touches=_touches(private),
        released=list(released),
        randomness="a seed: the noise is reproducible" if private.is_reproducible else "OS entropy",
        utility={},
        software=versions(("torch", "numpy", "scipy")),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=weights,
        context={
            "data_commitment": private.data_fingerprint,
            "ledger": _paid(private, delta),
            "adversary": ADVERSARY,
            "package": {"version": __version__, "sha256": package_hash()},
            "isolation": private.isolation,
            "generator": private.generator,
            "arithmetic": private.arithmetic.text,
        },
    )
    file.with_suffix(".sig").unlink(missing_ok=True)  # never a signature beside another certificate
    RunFolder(file.parent).write(file.name, json.dumps(certificate, indent=2) + "\n")
    return certificate


def _touches(private: "Private") -> list[dict[str, str]]:
    steps = f"{private.steps_taken} of {private.steps} steps were taken, and all were paid"
    found = [
        {"what": "size: the number of records is assumed public", "paid": "public"},
        {"what": f"training: noisy sums of clipped gradients; {steps}", "paid": "paid"},
    ]
    lost = (f"training: lost steps, taken again: {one}" for one in private.info.get("repaid", ()))
    found += [{"what": what, "paid": "paid"} for what in lost]
    for reason in private.info.get("public_changes", ()):
        what = f"training: weights changed beside the run, declared public: {reason}"
        found.append({"what": what, "paid": "public"})
    if private.event != private.training_event:
        what = "other releases that were planned with the run, which the events list first"
        found.append({"what": what, "paid": "paid"})
    return found


def _paid(private: "Private", delta: float) -> dict[str, Any] | None:  # Any: JSON values
    """Return the state of the ledger and the run's payments; None for a ledger in memory."""
    ledger = private.ledger
    if ledger.path is None:
        return None
    head, own = ledger.verify().head, [entry.id for entry in private.payments]
    return {**ledger_state(ledger, delta=delta, head=head, own=own), "head": head}

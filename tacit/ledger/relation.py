"""The neighboring relation of a release, which is that of the ledger that pays for it."""

from tacit.events import Relation


def agreed_relation(given: Relation | str | None, paid_under: Relation | None) -> Relation:
    """Return the `given` relation; raise unless it is that of the ledger, if a ledger pays.

    None takes the ledger's, or `ADD_REMOVE` without a ledger.
    """
    if given is None:
        return paid_under or Relation.ADD_REMOVE
    relation = Relation(given)
    if paid_under not in (None, relation):
        raise ValueError(
            f"relation must be that of the ledger, {paid_under}, got {relation}. "
            "Pass relation=ledger.relation."
        )
    return relation

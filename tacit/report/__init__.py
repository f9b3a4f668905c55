"""Reports: what a run promised and reached, as a page for people and as a certificate."""

from tacit.report.certificate import Problem, make_certificate, schema, verify
from tacit.report.figures import Figure, Role, Series, to_csv, to_svg

__all__ = [
    "Figure",
    "Problem",
    "Role",
    "Series",
    "make_certificate",
    "schema",
    "to_csv",
    "to_svg",
    "verify",
]

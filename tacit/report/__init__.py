"""Reports: the result and the guarantee of a run, as a page for people and as a certificate.

`certificate` states the claim so that anyone can recompute it, `figures` draws, `page` lays out one
HTML page, and `reports` fills them from a run folder. Names load when they are first used, because
`figures` is light and `reports` is not.
"""

from typing import TYPE_CHECKING

from tacit._lazy import lazy

if TYPE_CHECKING:
    from tacit.report.certificate import Problem, make_certificate, schema, verify
    from tacit.report.figures import Figure, Role, Series, to_csv, to_svg, to_svg_file, to_text
    from tacit.report.reports import write_logit_report, write_page, write_pate_sweep

_HOMES = {
    "Figure": "figures",
    "Problem": "certificate",
    "Role": "figures",
    "Series": "figures",
    "make_certificate": "certificate",
    "schema": "certificate",
    "to_csv": "figures",
    "to_svg": "figures",
    "to_svg_file": "figures",
    "to_text": "figures",
    "verify": "certificate",
    "write_logit_report": "reports",
    "write_page": "reports",
    "write_pate_sweep": "reports",
}

__all__ = [
    "Figure",
    "Problem",
    "Role",
    "Series",
    "make_certificate",
    "schema",
    "to_csv",
    "to_svg",
    "to_svg_file",
    "to_text",
    "verify",
    "write_logit_report",
    "write_page",
    "write_pate_sweep",
]

__getattr__ = lazy(__name__, _HOMES)

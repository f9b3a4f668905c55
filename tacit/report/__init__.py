"""Reports: the result and the guarantee of a run, as a page for people and as a certificate.

`certificate` states the claim so that anyone can recompute it, `run_certificate` derives it from a
run folder, `loop_certificate` from a training loop of one's own, `signature` says who vouches for
it, `figures` draws, `page` lays out one HTML page, `reports` fills them from a run folder,
`comparison_page` from several, and `study_page` and `logit_page` from studies of many fits. The
names of the last four load when they are first used, because they import much more than the others.
"""

from typing import TYPE_CHECKING

from tacit._lazy import lazy
from tacit.report.certificate import Problem, make_certificate, schema, verify
from tacit.report.figures import Figure, Role, Series, to_csv, to_svg, to_svg_file, to_text
from tacit.report.loop_certificate import certify
from tacit.report.run_certificate import (
    check_run,
    require_consistent,
    verify_run,
    write_certificate,
)
from tacit.report.signature import Verdict, judge, new_key, sign

if TYPE_CHECKING:
    from tacit.report.comparison_page import write_comparison
    from tacit.report.ledger_page import write_ledger_page
    from tacit.report.logit_page import write_logit_report
    from tacit.report.reports import write_page
    from tacit.report.study_page import cost_in_words, write_pate_sweep, write_study

__all__ = [
    "Figure",
    "Problem",
    "Role",
    "Series",
    "Verdict",
    "certify",
    "check_run",
    "cost_in_words",
    "judge",
    "make_certificate",
    "new_key",
    "require_consistent",
    "schema",
    "sign",
    "to_csv",
    "to_svg",
    "to_svg_file",
    "to_text",
    "verify",
    "verify_run",
    "write_certificate",
    "write_comparison",
    "write_ledger_page",
    "write_logit_report",
    "write_page",
    "write_pate_sweep",
    "write_study",
]

_STUDIES = ("cost_in_words", "write_pate_sweep", "write_study")
_HOMES: dict[str, str] = dict.fromkeys(_STUDIES, "study_page") | {
    "write_comparison": "comparison_page",
    "write_ledger_page": "ledger_page",
    "write_logit_report": "logit_page",
    "write_page": "reports",
}
__getattr__ = lazy(__name__, _HOMES)

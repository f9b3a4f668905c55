"""Reports: what a run promised and reached, as a page for people and as a certificate."""

from pathlib import Path

from tacit.report.certificate import Problem, make_certificate, schema, verify
from tacit.report.figures import Figure, Role, Series, to_csv, to_svg
from tacit.report.logit_report import write_logit_report

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
    "write_logit_report",
    "write_page",
]


def write_page(folder: str | Path) -> Path:
    """report.html of a finished run or sweep, with the figures' data beside it."""
    from tacit.experiments import SWEEP
    from tacit.report.run_report import write_report
    from tacit.report.sweep_report import write_sweep_report

    is_sweep = (Path(folder) / SWEEP).is_file()
    return write_sweep_report(folder) if is_sweep else write_report(folder)

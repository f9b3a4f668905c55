"""The coefficients of a regression as a table of the page: estimates, errors and intervals."""

from typing import Any

from tacit._untrusted import read_json
from tacit.experiments import Facts, RunFolder
from tacit.report.page import Section

_TEXT = (
    "In the units of the file. The coefficient makes the predictions, and is shrunk where noise "
    "asks for it. The estimate is not shrunk; its standard error and interval cover sampling and "
    "privacy noise. They were computed from released values and cost nothing more."
)


def coefficients_section(facts: Facts, run: RunFolder) -> tuple[Section, ...]:
    """Return a section with the coefficients of a run; empty if it fitted none."""
    if facts.method not in ("regression", "transfer"):
        return ()
    fitted = read_json(run / facts.model_file)
    intervals = fitted.get("intervals")
    if intervals is None:
        return ()
    confidence = f"{100 * intervals['confidence']:g} % interval"
    rows = [
        (name, _number(coef), _number(row["estimate"]), _number(row["std_error"]),
         f"{_number(row['lower'])} to {_number(row['upper'])}")
        for (name, coef), row in zip(
            fitted["coefficients"].items(), intervals["rows"].values(), strict=True
        )
    ]  # fmt: skip
    text = _TEXT
    if fitted["references"]:
        compared = (f"{column} with {base}" for column, base in fitted["references"].items())
        text += f" Categories are compared: {', '.join(compared)}."
    if fitted.get("residual_std") is not None:
        text += f" Residual standard deviation: {_number(fitted['residual_std'])}."
    header = ("term", "coefficient", "estimate", "standard error", confidence)
    return (
        Section(
            name="coefficients", title="Coefficients", text=text, rows=tuple(rows), header=header
        ),
    )


def _number(value: Any) -> str:  # Any: a JSON value
    """Return a number as text; what noise hides is None."""
    return "hidden by noise" if value is None else f"{value:.6g}"

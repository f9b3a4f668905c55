"""One self-contained HTML page: numbers first, then the promise, figures, and the certificate.

The page needs no network and no library in the browser. Its statements about the strength of a
claim follow NIST SP 800-226 (2025), section 2, and Ponomareva et al. 2023 (arXiv:2303.00654),
section 5.2.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from importlib import resources
from typing import Any, NamedTuple

from tacit.report.figures import Figure, to_csv, to_svg
from tacit.report.what_if import WhatIf


class Number(NamedTuple):
    """A headline number with its label and a note below it."""

    label: str
    value: str
    note: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """An additional section of the page, such as the outcome of an audit."""

    name: str
    title: str
    text: str
    rows: tuple[tuple[str, ...], ...] = ()
    header: tuple[str, ...] = ()
    """Names of the columns; empty for rows of a name and a value."""
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Page:
    """Everything that a report page says; `render` turns it into HTML."""

    title: str
    lead: str
    numbers: tuple[Number, ...]
    warnings: tuple[str, ...] = ()
    promise: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    sections: tuple[Section, ...] = ()
    what_if: WhatIf | None = None
    prices: tuple[Mapping[str, Any], ...] = ()
    fields: tuple[tuple[str, str], ...] = ()
    certificate: Mapping[str, Any] | None = None
    footer: str = ""


def render(page: Page) -> str:
    """Return the page as HTML, with every text escaped."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=False)
    template = environment.from_string(_resource("page.html.j2"))
    return template.render(
        page=page,
        to_svg=to_svg,
        to_link=_data_link,
        to_json=json.dumps,
        certificate=json.dumps(page.certificate, indent=2),
        css=_resource("page.css"),
        js=_resource("page.js"),
    )


def promise(epsilon: float, delta: float, unit: str, what: str = "this model") -> tuple[str, ...]:
    """Return the guarantee in words, and how much it lets anyone learn about one person.

    `what` names what was released.
    """
    if not math.isfinite(epsilon):
        return (f"Nothing: no noise was added. Treat {what} as if it were the data.",)
    certain = 1 / (1 + math.exp(-min(epsilon, 700.0)))
    factor = _at_most(math.exp(epsilon)) if epsilon < 20 else f"e^{_at_most(epsilon)}"
    return (
        f"Whatever someone concludes from {what} would have been almost as likely to be "
        f"concluded had any one {unit} been left out. The chance of any outcome changes by a "
        f"factor of at most {factor}, except with probability {delta:g}.",
        f"Someone who is undecided whether a given {unit} was in the data, and who then sees "
        f"{what}, can become at most {_at_most(100 * certain)} % certain, if delta is neglected.",
    )


def _at_most(value: float) -> str:
    """Return three digits of a value, rounded up: what is stated is an upper bound."""
    return f"{Context(prec=3, rounding=ROUND_CEILING).create_decimal(repr(value)):,g}"


def strength(epsilon: float) -> str:
    """Return a sentence that rates epsilon in three tiers (Ponomareva et al. 2023, section 5.2)."""
    if epsilon <= 1:
        return "strong formal guarantee (epsilon at most 1)"
    if epsilon <= 10:
        return "reasonable guarantee (epsilon at most 10)"
    return "weak formal guarantee (epsilon above 10): protection rests on attacks being weaker"


def cautions(
    *,
    epsilon: float,
    delta: float,
    n_records: int,
    is_reproducible: bool,
    is_shuffled: bool,
    not_covered: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return a warning for each weakness of the claim, such as a large delta or a fixed seed."""
    found = []
    if not math.isfinite(epsilon):
        found.append("Not private: this run includes a release without noise.")
    elif epsilon > 10:
        found.append(
            f"Epsilon is {epsilon:.3g}. Above 10 the formal guarantee says little by itself; "
            "an audit (tacit audit) measures how far known attacks get."
        )
    if delta > 1 / n_records:
        found.append(
            f"Delta is {delta:g}, above 1 / {n_records:,} records. Even a mechanism that "
            "publishes one record at random would meet this delta. Choose a much smaller one."
        )
    if is_shuffled:
        found.append(
            "Batches were shuffled, not sampled, so no privacy amplification may be claimed."
        )
    if is_reproducible:
        found.append(
            "The noise was drawn from a given seed, so whoever has the seed can remove the noise. "
            "Use a seed for tests only."
        )
    found.extend(f"Not covered by the claim: {what}" for what in not_covered)
    return tuple(found)


def noise_over_time(event: Mapping[str, Any], saving: object) -> tuple[tuple[str, str], ...]:
    """Return a row on the strategy of correlated noise in an event's JSON, and on what it saved.

    Without such noise there is no row. `saving` is how many times less noise running sums carry
    than with independent noise at the same price, or None.

    >>> noise_over_time({"type": "BandedGaussian", "column": [0.8, 0.6]}, 1.5)[0][1][:41]
    'noise correlated over 2 steps by the colu'
    >>> noise_over_time({"type": "BandedGaussian", "column": [0.8, 0.6]}, 0.5)[0][1][-50:]
    'carry 2.00 times more noise than independent noise'
    """
    if event.get("type") != "BandedGaussian":
        inside = [event.get("event"), *event.get("parts", ())]
        parts = (part for part in inside if isinstance(part, Mapping))
        return tuple(row for part in parts for row in noise_over_time(part, saving))
    column = event["column"]
    shown = ", ".join(f"{c:.3f}" for c in column[:8]) + (", ..." if len(column) > 8 else "")
    words = f"noise correlated over {len(column)} steps by the column ({shown})"
    if isinstance(saving, float):
        compared = f"{saving:.2f} times less" if saving >= 1 else f"{1 / saving:.2f} times more"
        words += f"; running sums carry {compared} noise than independent noise"
    return (("Noise over time", words),)


def _data_link(figure: Figure) -> str:
    """Return a link that holds the data of a figure as CSV, so that the page is one file."""
    content = base64.b64encode(to_csv(figure).encode()).decode()
    return f"data:text/csv;charset=utf-8;base64,{content}"


def _resource(name: str) -> str:
    return (resources.files("tacit.report") / name).read_text(encoding="utf-8")

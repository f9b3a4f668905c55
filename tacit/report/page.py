"""One self-contained HTML page: numbers first, then the promise, figures, and the certificate.

Needs no network and no library in the browser. What is said about the strength of a claim follows
NIST SP 800-226 (2025), section 2, and Ponomareva et al. 2023 (arXiv:2303.00654), section 5.2.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

from tacit.report.figures import Figure, to_svg


class Number(NamedTuple):
    """A headline number with its label and a note below it."""

    label: str
    value: str
    note: str


class Image(NamedTuple):
    """A picture inside the page: `source` is a data URL."""

    source: str
    caption: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page beyond the standard ones, such as an audit."""

    name: str
    title: str
    text: str
    rows: tuple[tuple[str, str], ...] = ()
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Page:
    """What the page says; `render` says how."""

    title: str
    lead: str
    numbers: tuple[Number, ...]
    warnings: tuple[str, ...] = ()
    promise: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    sections: tuple[Section, ...] = ()
    prices: tuple[Mapping[str, Any], ...] = ()
    fields: tuple[tuple[str, str], ...] = ()
    certificate: Mapping[str, Any] | None = None
    footer: str = ""


def render(page: Page) -> str:
    """The page as HTML; every text is escaped."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=False)
    template = environment.from_string(_resource("page.html.j2"))
    return template.render(
        page=page,
        figures=[(figure, to_svg(figure)) for figure in page.figures],
        certificate=json.dumps(page.certificate, indent=2),
        css=_resource("page.css"),
        js=_resource("page.js"),
    )


def promise(epsilon: float, delta: float, unit: str) -> tuple[str, ...]:
    """The guarantee in words, with what it means for a guess about one person."""
    if not math.isfinite(epsilon):
        return ("Nothing: no noise was added. Treat the model as if it were the data.",)
    certain = 1 / (1 + math.exp(-min(epsilon, 700.0)))
    factor = f"{math.exp(epsilon):,.3g}" if epsilon < 20 else f"e^{epsilon:.3g}"
    return (
        f"Whatever is concluded from this model would have been concluded almost as likely without "
        f"any one {unit}: the chance of any outcome changes by a factor of at most {factor}, "
        f"except with probability {delta:g}.",
        f"Someone who is undecided whether a given {unit} was in the data, and who sees the model, "
        f"can become at most {100 * certain:.3g} % certain (delta apart).",
    )


def strength(epsilon: float) -> str:
    """How strong a guarantee this is, in three tiers (Ponomareva et al. 2023, section 5.2)."""
    if epsilon <= 1:
        return "strong formal guarantee (epsilon at most 1)"
    if epsilon <= 10:
        return "reasonable guarantee (epsilon at most 10)"
    return "weak formal guarantee (epsilon above 10): rests on attacks being weaker than feared"


def cautions(
    *,
    epsilon: float,
    delta: float,
    n_records: int,
    is_reproducible: bool,
    is_shuffled: bool,
    not_covered: Sequence[str] = (),
) -> tuple[str, ...]:
    """Warnings where a claim is weak."""
    found = []
    if not math.isfinite(epsilon):
        found.append("Not private: a release without noise is part of this run.")
    elif epsilon > 10:
        found.append(
            f"Epsilon is {epsilon:.3g}. Above 10 the formal guarantee alone says little; an audit "
            "(tacit audit) shows what known attacks reach."
        )
    if delta > 1 / n_records:
        found.append(
            f"Delta is {delta:g}, above 1 / {n_records:,} records: a mechanism that publishes one "
            "record at random would pass. Choose it well below."
        )
    if is_shuffled:
        found.append("Batches were shuffled, not sampled: no amplification may be claimed for it.")
    if is_reproducible:
        found.append(
            "The noise was drawn from a given seed: whoever knows the seed can remove it. "
            "Use the seed for tests only."
        )
    found.extend(f"Not covered by the claim: {what}" for what in not_covered)
    return tuple(found)


def _resource(name: str) -> str:
    return (resources.files("tacit.report") / name).read_text(encoding="utf-8")

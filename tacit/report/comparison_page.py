"""The page that compares several runs: what differs, what they share, epsilon against quality."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from tacit import accounting
from tacit.errors import NotCertified, UnsupportedEvent
from tacit.events import Relation
from tacit.events import Sequence as EventSequence
from tacit.experiments import SWEEP, Facts, RunFolder
from tacit.report.figures import Figure, Role, Series
from tacit.report.page import Number, Page, Section
from tacit.report.reports import interval_in_words, interval_of, metric_in_words, write_report
from tacit.report.run_certificate import require_consistent

_ROLES = (Role.PRIVATE, Role.OTHER, Role.FOURTH, Role.PUBLISHED, Role.BOUND, Role.BASELINE)
_MISSING = "–"


class Compared(NamedTuple):
    """One of the runs: the name that tells it from the others, its folder and its facts."""

    name: str
    run: RunFolder
    facts: Facts

    @property
    def quality(self) -> float | None:
        """The metric of the run; None if it was not measured."""
        return self.facts.utility.mean

    @property
    def results(self) -> dict[str, str]:
        """What the run cost and how good its model is, as text by name."""
        facts = self.facts
        found = {
            "method": facts.method,
            "data": facts.data,
            "records": f"{facts.n_records:,}",
            "unit of privacy": facts.unit,
            "neighboring relation": facts.relation.replace("_", " "),
            "epsilon": f"{facts.epsilon:.4f}" if math.isfinite(facts.epsilon) else "∞",
            "delta": f"{facts.delta:g}",
            "model": facts.model,
        }
        if self.quality is None:
            return found | {"quality": f"not measured: {facts.unmeasured}"}
        metric = facts.utility.metric
        found[metric] = metric_in_words(metric, self.quality)
        found[f"{metric}, interval"] = interval_in_words(facts) or "none"
        return found

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the run as text by name."""
        given = {**self.facts.hyperparameters, "sampling": self.facts.sampling_used}
        given["seed"] = self.facts.seed
        return {name: _text(value) for name, value in given.items() if value is not None}


def write_comparison(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Write a page that compares finished runs into the folder `out`, and return its path.

    Runs of different methods are compared by what they share. Raises `ValueError` for a sweep,
    which has a page of its own, for a folder that is given twice, and if the parts of a run folder
    disagree.
    """
    place = RunFolder(out)
    if place.is_finished or (place / SWEEP).is_file():
        raise ValueError(f"--out {out} is a run folder, whose page would be lost: choose another.")
    runs = read_runs(folders)
    figures = comparison_figures(runs)
    return write_report(place, figures, comparison_page(runs, figures))


def read_runs(folders: Sequence[str | Path]) -> list[Compared]:
    """Return the runs in these folders, named by as much of their paths as tells them apart."""
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < max(2, len(paths)):
        raise ValueError("a comparison needs two or more different run folders.")
    found = []
    for path, name in zip(paths, _names(paths), strict=True):
        if (path / SWEEP).is_file():
            raise ValueError(
                f"{path} is a sweep, which is compared on its own page: tacit report {path}. "
                "Give the folders of single runs."
            )
        run = RunFolder(path)
        require_consistent(run)
        found.append(Compared(name, run, run.facts()))
    return found


def comparison_figures(runs: Sequence[Compared]) -> tuple[Figure, ...]:
    """Return epsilon against quality, and quality by epoch, for runs that were measured alike.

    These are runs of the same data and metric. A run that has no companion is in the table alone.
    """
    figures: list[Figure] = []
    alike: dict[tuple[str, str], list[Compared]] = {}
    for compared in runs:
        if compared.quality is not None:
            key = compared.facts.utility.metric, compared.facts.data
            alike.setdefault(key, []).append(compared)
    for number, ((metric, data), group) in enumerate(alike.items()):
        if len(group) > 1:
            drawn = [_by_epsilon(metric, data, group), *_by_epoch(metric, data, group)]
            figures += [replace(f, name=f"{f.name}-{number}" if number else f.name) for f in drawn]
    return tuple(figures)


def _by_epsilon(metric: str, data: str, runs: Sequence[Compared]) -> Figure:
    series = tuple(_point(c, role) for c, role in zip(runs, cycle(_ROLES)))
    whiskers = "Whiskers are 95 % intervals." if any(s.low for s in series) else ""
    return Figure(
        name=f"{metric}-by-epsilon",
        title=f"{metric.capitalize()} against epsilon on {data}",
        caption=f"One dot for each run. {whiskers}".strip(),
        x_label="epsilon",
        y_label=metric,
        x_log=max(c.facts.epsilon for c in runs) > 3 * min(c.facts.epsilon for c in runs),
        y_percent=metric == "accuracy",
        series=series,
    )


def _point(compared: Compared, role: Role) -> Series:
    facts, quality = compared.facts, compared.quality
    assert quality is not None  # the caller has left the others out
    ends = interval_of(facts)
    low, high = ((ends[0],), (ends[1],)) if ends else ((), ())
    return Series(
        name=compared.name, x=(facts.epsilon,), y=(quality,), low=low, high=high, role=role,
        is_line=False,
    )  # fmt: skip


def _by_epoch(metric: str, data: str, runs: Sequence[Compared]) -> list[Figure]:
    lines = []
    for compared, role in zip(runs, cycle(_ROLES)):
        facts = compared.facts
        rows = compared.run.read_lines(facts.metrics_file) if facts.metrics_file else []
        points = [(row["epoch"], row[metric]) for row in rows if {"epoch", metric} <= row.keys()]
        if len(points) > 1:
            lines.append(Series.of(compared.name, points, role))
    if len(lines) < 2:
        return []
    figure = Figure(
        name=f"{metric}-by-epoch",
        title=f"{metric.capitalize()} after each epoch on {data}",
        caption="One line for each run that was measured on the way.",
        x_label="epoch",
        y_label=metric,
        y_percent=metric == "accuracy",
        series=tuple(lines),
    )
    return [figure]


def comparison_page(runs: Sequence[Compared], figures: tuple[Figure, ...]) -> Page:
    """Return the content of the page, ready for `render`."""
    different, same = _split([c.results for c in runs])
    other, equal = _split([c.settings for c in runs])
    header = ("", *(c.name for c in runs))
    methods = sorted({c.facts.method for c in runs})
    kinds = f"Runs of {', '.join(methods)}, compared by what they share." if methods[1:] else ""
    return Page(
        title=f"Comparison of {len(runs)} runs",
        lead=f"{', '.join(c.name for c in runs)}. {kinds}".strip(),
        numbers=_numbers(runs),
        warnings=_warnings(runs),
        figures=figures,
        sections=(
            _table("different", "Results that differ", "", header, different),
            _table("settings", "Settings that differ", "", header, other),
            _table("same", "The same in all runs", "", (), [row[:2] for row in same + equal]),
        ),
        footer="Written by tacit. Every run has a page and a certificate of its own.",
    )


def _numbers(runs: Sequence[Compared]) -> tuple[Number, ...]:
    epsilons = [c.facts.epsilon for c in runs]
    numbers = [
        Number("runs", str(len(runs)), "each with its own bill"),
        Number("epsilon", f"{min(epsilons):.3f} to {max(epsilons):.3f}", "of each run alone"),
    ]
    if (together := _price_of_all(runs)) is not None:
        note = f"epsilon of releasing every run, at delta {max(c.facts.delta for c in runs):g}"
        numbers.append(Number("all of them", f"{together:.3f}", note))
    measured = [c for c in runs if c.quality is not None]
    metrics = {c.facts.utility.metric for c in measured}
    if len(metrics) == 1 and len({c.facts.data for c in measured}) == 1:
        (metric,), best = metrics, max(measured, key=lambda c: c.quality or 0.0)
        assert best.quality is not None  # it was measured
        note = f"{best.name}, epsilon {best.facts.epsilon:.3g}"
        numbers.append(Number(f"best {metric}", metric_in_words(metric, best.quality), note))
    return tuple(numbers)


def _price_of_all(runs: Sequence[Compared]) -> float | None:
    """Return the price of all runs on the same data; None if it is another thing or not known."""
    facts = [c.facts for c in runs]
    if len({(f.relation, f.unit, f.data, f.n_records) for f in facts}) > 1:
        return None
    every = EventSequence(tuple(f.claim for f in facts))
    try:
        delta, relation = max(f.delta for f in facts), Relation(facts[0].relation)
        return accounting.epsilon(every, delta=delta, relation=relation)
    except (NotCertified, UnsupportedEvent):
        return None


def _warnings(runs: Sequence[Compared]) -> tuple[str, ...]:
    found = []
    for what, values in (
        ("units of privacy", {c.facts.unit for c in runs}),
        ("neighboring relations", {c.facts.relation for c in runs}),
    ):
        if len(values) > 1:
            listed = ", ".join(sorted(value.replace("_", " ") for value in values))
            found.append(
                f"The runs have different {what} ({listed}): their epsilons mean different things."
            )
    if len({c.facts.data for c in runs}) > 1:
        found.append("The runs are of different data: quality is compared on the same data alone.")
    if len({c.facts.utility.metric for c in runs if c.quality is not None}) > 1:
        found.append("The runs were measured by different metrics: figures show those in common.")
    if len({c.facts.delta for c in runs}) > 1:
        found.append("Each epsilon is stated at the delta of its run, and the deltas differ.")
    return tuple(found)


Rows = list[tuple[str, ...]]


def _split(columns: Sequence[dict[str, str]]) -> tuple[Rows, Rows]:
    """Return the rows whose values differ among the columns, and the others."""
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [(name, *(column.get(name, _MISSING) for column in columns)) for name in names]
    return [r for r in rows if len(set(r[1:])) > 1], [r for r in rows if len(set(r[1:])) == 1]


def _table(name: str, title: str, text: str, header: tuple[str, ...], rows: Rows) -> Section:
    text = text or ("" if rows else "Nothing.")
    return Section(name=name, title=title, text=text, header=header, rows=tuple(rows))


def _names(paths: Sequence[Path]) -> list[str]:
    """Return for each path as many of its last parts as tell it from all others."""
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

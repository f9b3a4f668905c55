"""Reports: certificate, figures and page of a run or of a sweep."""

import csv
import math
import statistics
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest

from tacit._untrusted import read_json, read_text
from tacit.experiments import (
    AUDIT,
    SWEEP,
    Facts,
    Metric,
    RunFolder,
    Summary,
    Sweep,
)
from tacit.report.certificate import CONTEXT
from tacit.report.coefficient_table import coefficients_section
from tacit.report.declared_columns import columns_section
from tacit.report.figures import (
    Figure,
    PictureRow,
    Role,
    Series,
    files,
    not_drawn,
    repeats_in_words,
    to_svg_file,
)
from tacit.report.page import (
    Number,
    Page,
    Section,
    cautions,
    noise_over_time,
    promise,
    render,
    strength,
)
from tacit.report.run_certificate import randomness_of, write_certificate
from tacit.report.text_page import text_sections
from tacit.report.transfer_figures import transfer_figures
from tacit.report.what_if import what_if

REPORT, FIGURES = "report.html", "figures"
STUDY = "study.json"
DEVIATION = "are one standard deviation"
_SUMMARY = "summary"  # the method of runs that release statistics and no model

_DELTA_ROLES = (Role.PRIVATE, Role.OTHER, Role.FOURTH, Role.BOUND)  # one for each delta of a sweep
_MOST_BELOW = 0.3  # a baseline farther below the other lines is not drawn: it would flatten them
_ROC_POINTS = 120  # points of a ROC curve that are drawn
_AUDITS = {  # whether the audit has lower bounds: what it did
    True: (
        "Attacking the run gives lower bounds on epsilon. They must stay below the bill; if one is "
        "above the bill, something is broken. Tests compare what the program does with the bill."
    ),
    False: (
        "Tests compare what the program does with the bill, on artificial records. The run itself "
        "was not attacked, so there are no lower bounds on epsilon."
    ),
}


def write_page(folder: str | Path) -> Path:
    """Write the report of a finished run or sweep into its folder, and return the page's path.

    The report is report.html, the figures with their data, and for a run the certificate. Raises
    `ValueError` if the parts of a run folder disagree (`tacit.report.check_run`).
    """
    if (Path(folder) / SWEEP).is_file():
        sweep = Sweep.read(folder)
        figures = sweep_figures(sweep)
        return write_report(RunFolder(folder), figures, _sweep_page(sweep, figures))
    run = RunFolder(folder)
    facts = run.facts()
    certificate = write_certificate(run)
    figures, attacks = run_figures(facts, run), _audit_sections(run)
    recipe = _recipe(run, facts)
    results = (
        *_statistics_sections(facts, run),
        *coefficients_section(facts, run),
        *columns_section(recipe),
        *text_sections(facts, run),
    )
    for figure in (figure for section in attacks for figure in section.figures):
        run.write(f"{FIGURES}/{figure.name}.svg", to_svg_file(figure))  # the audit wrote the data
    page = page_of(facts, certificate, figures, (*results, *attacks), name=recipe.get("name", ""))
    if page.what_if is not None:
        _write_figures(run, [page.what_if.figure])
    return write_report(run, figures, page)


def _recipe(run: RunFolder, facts: Facts) -> dict[str, Any]:  # Any: TOML values
    """Return the recipe of a run as plain values; empty for runs that keep none."""
    path = run / facts.recipe_file
    return tomllib.loads(read_text(path)) if facts.recipe_file and path.is_file() else {}


def write_report(run: RunFolder, figures: Iterable[Figure], page: Page) -> Path:
    """Write the figures and the page report.html into the folder `run`; return the page's path."""
    _write_figures(run, figures)
    return run.write(REPORT, render(page))


def _write_figures(run: RunFolder, figures: Iterable[Figure]) -> None:
    for figure in figures:
        for name, content in files(figure):
            run.write(f"{FIGURES}/{name}", content)


def run_figures(facts: Facts, run: RunFolder) -> tuple[Figure, ...]:
    """Return figures of utility and epsilon by epoch, or for PATE by number of answers.

    The figures of PATE are computed from released labels alone. Margins between vote counts are
    private and are not drawn.
    """
    private = run.read_lines(facts.metrics_file) if facts.metrics_file else []
    if facts.method == "PATE" and len(private) < 2:
        return ()
    if facts.method == "transfer":
        return transfer_figures(read_json(run / facts.model_file))
    if facts.method == "PATE":
        cost = f"Epsilon at delta {facts.delta:g} after each number of answers, for any data."
        taught = "Accuracy on public test records of a student that learns from these answers only."
        return (
            _line(private, "epsilon", "answers", title="What the answers cost", caption=cost),
            _line(private, "accuracy", "answers", title="What the answers taught", caption=taught),
        )
    twin = [] if facts.baseline_file is None else run.read_lines(facts.baseline_file)
    figures = []
    titles = {"accuracy": "Accuracy", "auc": "Area under the ROC curve", "perplexity": "Perplexity"}
    for metric, title in titles.items():
        if private and metric in private[0]:
            figures.append(_metric_by_epoch(metric, title, private, twin))
    losses = [row for row in private if "training_loss" in row]
    if len(losses) > 1:
        figures.append(_training_loss(losses))
    if len(private) > 1:
        caption = f"Epsilon, at delta {facts.delta:g}, of a run planned to end at that epoch."
        figures.append(
            _line(private, "epsilon", "epoch", title="Epsilon by epoch", caption=caption)
        )
    return tuple(figures)


def page_of(
    facts: Facts,
    certificate: dict[str, Any],
    figures: tuple[Figure, ...],
    sections: tuple[Section, ...] = (),
    *,
    name: str = "",
) -> Page:
    """Return the content of a run's page, ready for `render`; `name` is that of its recipe."""
    stated = certificate["claim"]["epsilon"]
    epsilon = math.inf if stated is None else stated
    is_summary = facts.method == _SUMMARY
    what = "statistics" if is_summary else "model"
    made = "of about" if is_summary else f"trained by {facts.method} on"
    return Page(
        title=f"{name or facts.data}: {'' if is_summary else 'a '}differentially private {what}",
        lead=(
            f"{facts.model}, {made} {facts.n_records:,} {facts.unit}s of {facts.data}. "
            f"Unit of privacy: one {facts.unit}."
        ),
        numbers=_numbers(facts, epsilon),
        warnings=cautions(
            epsilon=epsilon,
            delta=facts.delta,
            n_records=facts.n_records,
            is_reproducible=isinstance(facts.seed, int),
            is_shuffled="shuffl" in facts.sampling_used.lower(),
            not_covered=[t.how for t in facts.touches if t.cost == "not covered"],
        ),
        promise=promise(
            epsilon, facts.delta, facts.unit, f"{'these' if is_summary else 'this'} {what}"
        ),
        figures=figures,
        sections=(*sections, _levels(facts, epsilon)),
        what_if=what_if(facts),
        prices=tuple(certificate["prices"]),
        fields=tuple(  # a name that comes twice has one row
            dict(
                (
                    *_fields(facts, epsilon),
                    *_group_fields(certificate),
                    *_context_fields(certificate),
                )
            ).items()
        ),
        certificate=certificate,
        footer=f"Written by tacit {facts.versions.get('tacit', '')}; run of {facts.created}.",
    )


def _numbers(facts: Facts, epsilon: float) -> tuple[Number, ...]:
    utility = facts.utility
    numbers = [
        Number("epsilon", f"{epsilon:.3f}" if math.isfinite(epsilon) else "∞", "certified bound"),
        Number("delta", f"{facts.delta:g}", f"{facts.n_records:,} {facts.unit}s"),
    ]
    if facts.method == _SUMMARY:
        return tuple(numbers)
    if utility.mean is None:
        return (*numbers, Number("utility", "not measured", facts.unmeasured))
    shown = partial(metric_in_words, utility.metric)
    spread = "" if utility.spread is None else f" ± {100 * utility.spread:.2f} over seeds"
    interval = f"; {words}" if (words := interval_in_words(facts)) else ""
    about = f"on {utility.n_test:,} {_measured(facts)}{spread}{interval}"
    numbers.append(Number(f"private {utility.metric}", shown(utility.mean), about))
    if "auc" in utility.intervals:
        low, high = utility.intervals["auc"]
        if low <= 0 and high >= 1:
            numbers.append(Number("private AUC", "not measured", "the noise was too large"))
        else:
            value = f"{utility.others['auc']:.4f}"
            numbers.append(Number("private AUC", value, f"95 % interval {low:.4f} to {high:.4f}"))
    if utility.majority is not None:
        numbers.append(
            Number("commonest class", shown(utility.majority), "what a constant answer reaches")
        )
    if utility.non_private:
        mean = sum(one.value for one in utility.non_private) / len(utility.non_private)
        cost = mean - utility.mean
        if utility.metric == "accuracy":
            words = f"{100 * cost:.2f} points"
        else:  # of a loss or a perplexity, less is better
            words = f"{-cost if utility.metric in ('loss', 'perplexity') else cost:.4f}"
        numbers.append(Number("without privacy", shown(mean), f"privacy costs {words}"))
    return tuple(numbers)


def metric_in_words(name: str, value: float) -> str:
    """Return a metric as text: an accuracy in percent, others with four digits."""
    return f"{100 * value:.2f}\N{NO-BREAK SPACE}%" if name == "accuracy" else f"{value:.4f}"


def interval_of(facts: Facts) -> tuple[float, float] | None:
    """Return the 95 % interval of a run's metric; None if there is none.

    A paid metric has an interval that includes its noise. An accuracy that was measured exactly has
    the score interval of Wilson 1927: how far it may be off because the test records are a sample.
    """
    utility = facts.utility
    if utility.metric in utility.intervals:
        return utility.intervals[utility.metric]
    if utility.metric != "accuracy" or utility.mean is None or utility.n_test < 1:
        return None
    right = round(utility.mean * utility.n_test)
    found = binomtest(right, utility.n_test).proportion_ci(0.95, method="wilson")
    return float(found.low), float(found.high)


def interval_in_words(facts: Facts) -> str:
    """Return the 95 % interval of a run's metric as text that states its kind, or no text."""
    ends = interval_of(facts)
    if ends is None:
        return ""
    is_paid = facts.utility.metric in facts.utility.intervals
    kind = "95 % interval, noise included," if is_paid else "95 % Wilson interval"
    low, high = (metric_in_words(facts.utility.metric, end) for end in ends)
    return f"{kind} {low} to {high}"


def _measured(facts: Facts) -> str:
    """Return words for the records that utility was measured on; say "public" only if they are."""
    costs = {t.cost for t in facts.touches if t.what == "evaluation"}
    if costs == {"paid"}:
        return f"held-out private {facts.unit}s, with noise that was paid for"
    return "public test records" if costs <= {"public"} else "held-out records, not covered"


def _fields(facts: Facts, epsilon: float) -> tuple[tuple[str, str], ...]:
    price = f"epsilon {epsilon:.4f}, delta {facts.delta:g}; {strength(epsilon)}"
    tuning = [t.how for t in facts.touches if t.what in ("model selection", "early stopping")]
    return (
        ("Setting", facts.trust),
        ("Unit of privacy", f"one {facts.unit}"),
        ("Neighboring relation", facts.relation.replace("_", " ")),
        ("Guarantee", price),
        ("Mechanism", f"{facts.method}: {facts.claim}"),
        ("Accounting", "privacy loss distributions with certified error; others for comparison"),
        ("Sampling assumed", facts.sampling_assumed),
        ("Sampling used", facts.sampling_used),
        *noise_over_time(facts.event, facts.hyperparameters.get("noise_saving")),
        ("What is released", "; ".join(facts.released)),
        ("Assumed public", "; ".join(facts.assumed_public)),
        ("Uses of the data", "; ".join(f"{t.what} ({t.cost}): {t.how}" for t in facts.touches)),
        ("Tuning", "; ".join(tuning) or "none on private data"),
        ("Randomness", randomness_of(facts)),
        *((("Isolation of examples", facts.isolation),) if facts.isolation else ()),
        ("Hyperparameters", ", ".join(f"{k} {v}" for k, v in facts.hyperparameters.items())),
        ("Software", ", ".join(f"{k} {v}" for k, v in facts.versions.items())),
    )


def _group_fields(certificate: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return a row with epsilon for persons who have several records, if the unit is a record."""
    groups = certificate["claim"].get("groups", ())
    shown = [f"{group['records']} records: {_group_epsilon(group)}" for group in groups]
    return (("Epsilon for a person with several records", "; ".join(shown)),) if shown else ()


def _group_epsilon(group: dict[str, Any]) -> str:
    if group["epsilon"] is None:
        return "not known"
    is_bound = group.get("price") == "upper bound"
    return f"{'at most ' if is_bound else ''}{group['epsilon']:.4g}"


def _context_fields(certificate: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return rows for what the claim rests on beside the events, as far as it is known."""
    context = {**dict.fromkeys(CONTEXT), **certificate.get("context", {})}
    ledger, package, audit = (context[name] for name in ("ledger", "package", "audit"))
    rows = {
        "Adversary": context["adversary"],
        "Records per person": context["records_per_person"],
        "Price of tuning": context["tuning"],
        "Isolation of examples": context["isolation"],
        "Generator": context["generator"],
        "Arithmetic": context["arithmetic"],
        "Data commitment": context["data_commitment"],
        "Ledger": ledger and _ledger_words(ledger),
        "Package": package and f"tacit {package['version']}, SHA-256 {package['sha256']}",
        "Audit": audit and ("no fault found" if audit["passes"] else "the bill is refuted"),
        "Issuer": certificate.get("issuer") or "not signed",
    }
    return tuple((name, str(value)) for name, value in rows.items() if value)


def _ledger_words(ledger: dict[str, Any]) -> str:
    epsilon = ledger["epsilon"]
    names = {
        "budget": "the budget guarantees",
        "fixed_in_advance": "if all was fixed in advance",
        "odometer": "at any time, however it was chosen",
    }
    found = [f"{text}: {epsilon[n]:.4g}" for n, text in names.items() if epsilon.get(n) is not None]
    own = ", ".join(map(str, ledger["entries_of_run"]))
    return (
        f"{ledger['entries']:,} payments on these records when the run ended, of which number "
        f"{own} for this run. Epsilon of all of them, {'; '.join(found)}."
    )


def _levels(facts: Facts, epsilon: float) -> Section:
    """Return a section with the levels of this run's claim (NIST SP 800-226, figure 1)."""
    unstated = "Nothing is stated about the rounding of sums before noise is added."
    runs = 1 if facts.utility.spread is None else len(facts.utility.private)
    quality = (
        f"Utility is that of {'one run' if runs == 1 else f'{runs} runs'}, as a mean over "
        f"{facts.utility.n_test:,} {_measured(facts)}; differences between groups of people are "
        "not measured."
    )
    if facts.method == _SUMMARY:
        quality = "Each statistic has an interval of its own; all of them together have less."
    rows = {
        "The guarantee": f"epsilon {epsilon:.4f} at delta {facts.delta:g} for one {facts.unit} "
        f"({facts.relation.replace('_', ' ')}): {strength(epsilon)}.",
        "Algorithm and utility": f"{facts.method}, priced by an accountant with certified error. "
        f"{quality}",
        "Implementation": f"Trust model: {facts.trust}. Noise: {randomness_of(facts)}, added to "
        f"whole numbers of a public step. {facts.arithmetic or unstated} "
        "Timing is not hidden.",
        "Collection and access": "This page does not cover who collected the records, who may "
        "read them, and how long they are kept. The run folder holds no records, and the key of "
        "its noise was removed when the run ended.",
    }
    text = (
        "NIST SP 800-226 arranges the parts of a claim of differential privacy in levels. "
        "A level is worth no more than the levels below it."
    )
    title = "What the claim rests on"
    return Section(name="levels", title=title, text=text, rows=tuple(rows.items()))


def _metric_by_epoch(metric: str, title: str, private: list[Metric], twin: list[Metric]) -> Figure:
    caption = "The private model after each epoch."
    figure = _line(private, metric, "epoch", title=f"{title} on records not trained on")
    series = [replace(figure.series[0], name="private")]
    # Epochs after the end of the private run would squeeze its line together.
    beside = [row for row in twin if row["epoch"] <= private[-1]["epoch"] and metric in row]
    if beside:
        points = ((row["epoch"], row[metric]) for row in beside)
        series.append(Series.of("without privacy", points, Role.BASELINE))
        last = f"{twin[-1][metric]:.2%}" if metric == "accuracy" else f"{twin[-1][metric]:.4f}"
        caption += (
            " A model trained on the same records without privacy ends at "
            f"{last} after {twin[-1]['epoch']:.3g} epochs."
        )
    return replace(figure, caption=caption, series=tuple(series))


def _training_loss(rows: Sequence[Metric]) -> Figure:
    caption = "Mean loss of the lots of each epoch; bands are one standard deviation of its noise."
    figure = _line(rows, "training_loss", "epoch", title="Training loss, released with noise")
    line = replace(
        figure.series[0],
        name="noisy training loss",
        low=tuple(row["training_loss"] - row["training_loss_std"] for row in rows),
        high=tuple(row["training_loss"] + row["training_loss_std"] for row in rows),
    )
    return replace(figure, y_label="training loss", caption=caption, series=(line,))


def _line(rows: Sequence[Metric], y: str, x: str, *, title: str, caption: str = "") -> Figure:
    """Return a figure of metric `y` against metric `x`, from the rows that contain `y`."""
    return Figure(
        name=f"{y}-by-{x}",
        title=title,
        caption=caption,
        x_label=x,
        y_label=y,
        y_percent=y == "accuracy",
        series=(Series.of(y, ((row[x], row[y]) for row in rows if y in row)),),
    )


def _statistics_sections(facts: Facts, run: RunFolder) -> tuple[Section, ...]:
    """Return the page's section with the statistics of a summary; empty for other runs."""
    if facts.method != _SUMMARY:
        return ()
    stored = read_json(run / facts.model_file)["rows"]
    rows = [
        (
            f"{row['column']}: {row['statistic']}",
            f"{_stored(row['value'])}, {100 * row['confidence']:g} % interval "
            f"{_stored(row['lower'])} to {_stored(row['upper'])} ({row['about']})",
        )
        for row in stored
    ]
    text = (
        "Values have noise that was paid for. An interval about the records says what noise may "
        "have changed; one about the population also covers that the records are a sample."
    )
    return (Section(name="statistics", title="Statistics", text=text, rows=tuple(rows)),)


def _stored(value: float | None) -> str:
    """Return a number of summary.json as text with the same digits; None is unbounded."""
    return "unbounded" if value is None else f"{value:.6g}"


def _audit_sections(run: RunFolder) -> tuple[Section, ...]:
    """Return the page's section about the audit of the run; empty if there was no audit."""
    path = run / AUDIT
    if not path.is_file():
        return ()
    audit = read_json(path)
    rows = [
        (
            bound["method"],
            f"epsilon at least {bound['epsilon_lower']:.3f} "
            f"({bound['n_canaries']:,} canaries; assumes {bound['assumes']})",
        )
        for bound in audit.get("bounds", ())
    ]
    rows += [
        (
            "test of the bill",
            f"p-value {test['p_value']:.3g} for the privacy curve that the bill states "
            f"(assumes {test['assumes']})",
        )
        for test in audit.get("tests", ())
    ]
    rows += _mechanism_rows(audit.get("mechanism") or {})
    shown = audit.get("demonstrations") or {}
    rows += [
        (f"membership attack, {name}", f"area under the ROC curve {values['auc']:.3f}")
        for name, values in shown.get("membership", {}).items()
    ]
    captions = {Path(file).stem: caption for file, caption in shown.get("figures", {}).items()}
    error = f"{100 * audit.get('family_wise_error', 0.05):g} %"
    found = (attack_figure(run / f"{FIGURES}/{name}.csv", text) for name, text in captions.items())
    return (
        Section(
            name="audit",
            title="What the audit found",
            text=(
                f"{_AUDITS[bool(audit.get('bounds'))]} If the bill is correct, all of this "
                f"together raises a false alarm with a probability of at most {error}."
            ),
            rows=tuple(rows),
            figures=tuple(figure for figure in found if figure is not None),
        ),
    )


def _mechanism_rows(mechanism: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what an audit tested of the mechanism, what it did not, and what it found."""
    if not mechanism:
        return []
    tested = mechanism["tested"]
    parts = ", ".join(dict.fromkeys(one["part"] for one in tested))
    faults = [f"{one['part']}: {one['name']}" for one in tested if one["is_flagged"]]
    outcome = "; ".join(faults) if faults else "no fault found"
    rows = [("tests of the mechanism", f"{len(tested)} tests of {parts}: {outcome}")]
    return rows + [("not tested", what) for what in mechanism["not_tested"]]


def attack_figure(path: Path, caption: str) -> Figure | None:
    """Return the figure of an attack from the file `path` of an audit; None if it does not exist.

    `path` holds either ROC curves (columns curve, fpr, tpr) or the pixels of square pictures
    (columns row, image, pixel, value).
    """
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    if not rows:
        return None
    figure = (_roc if "fpr" in rows[0] else _inverted)(path.stem, rows)
    if figure is None or not_drawn(caption, figure):  # a caption that fits another figure
        return figure
    return replace(figure, caption=caption)


def _roc(name: str, rows: list[dict[str, str]]) -> Figure:
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        point = float(row["fpr"]), float(row["tpr"])
        curves.setdefault(row["curve"].replace(";", ","), []).append(point)
    least = min(fpr for points in curves.values() for fpr, _ in points if fpr > 0)
    grid = np.geomspace(min(least, 1e-3), 1.0, _ROC_POINTS)
    rates = tuple(grid.tolist())
    roles = {"released model": Role.PRIVATE, "without privacy": Role.PUBLISHED}
    series = []
    for curve, points in curves.items():
        fpr, tpr = np.transpose(sorted(points))
        if curve.startswith("any attack"):  # a limit in closed form: straight between its points
            role, best = Role.BOUND, np.interp(grid, fpr, tpr)
        else:  # an attack: the best rate that it reaches at a false positive rate of at most `grid`
            role = roles.get(curve, Role.OTHER)
            best = tpr[np.searchsorted(fpr, grid, side="right") - 1]
        series.append(Series(name=curve, x=rates, y=tuple(best.tolist()), role=role))
    return Figure(
        name=name,
        title="Membership inference",
        caption="",
        x_label="false positive rate",
        y_label="true positive rate",
        x_log=True,
        y_log=True,
        series=(*series, Series(name="chance", x=rates, y=rates, role=Role.BASELINE)),
    )


def _inverted(name: str, rows: list[dict[str, str]]) -> Figure | None:
    pixels: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        pictures = pixels.setdefault(row["row"].replace(";", ","), {})
        pictures.setdefault(row["image"], []).append(float(row["value"]))
    side = math.isqrt(len(next(iter(next(iter(pixels.values())).values()))))
    try:
        shaped = [
            PictureRow(name=row, pictures=np.reshape(list(found.values()), (-1, side, side)))
            for row, found in pixels.items()
        ]
    except ValueError:  # the pictures are not square
        return None
    return Figure(name=name, title="Model inversion", caption="", pictures=tuple(shaped))


def sweep_figures(sweep: Sweep) -> tuple[Figure, ...]:
    """Return figures of accuracy (also AUC and loss, if known) against epsilon, per delta."""
    figures = [_by_epsilon(sweep, "accuracy", "Accuracy on records not trained on")]
    if all(cell.auc is not None for cell in sweep.cells):
        figures.append(_by_epsilon(sweep, "auc", "Area under the ROC curve"))
    if all(cell.loss is not None for cell in sweep.cells):
        figures.append(_by_epsilon(sweep, "loss", "Loss on records not trained on"))
    return tuple(figures)


def _by_epsilon(sweep: Sweep, metric: str, title: str) -> Figure:
    deltas = sorted({cell.delta for cell in sweep.cells})
    series = [_at_delta(sweep, metric, *pair) for pair in zip(deltas, cycle(_DELTA_ROLES))]
    ends = min(min(s.x) for s in series), max(max(s.x) for s in series)
    if sweep.baseline is not None and metric in sweep.baseline:
        series.append(flat_line("without privacy", sweep.baseline[metric], ends, Role.BASELINE))
    lowest = min(min(s.y) for s in series)
    if metric == "accuracy" and sweep.majority and lowest - sweep.majority < _MOST_BELOW:
        series.append(flat_line("commonest class", sweep.majority, ends, Role.BOUND))
    if metric == "accuracy" and sweep.published:
        points = sorted((p.epsilon, p.accuracy) for p in sweep.published)
        name = " and ".join(dict.fromkeys(p.source for p in sweep.published))
        series.append(replace(Series.of(name, points, Role.PUBLISHED), is_line=False))
    counts = Counter((cell.epsilon, cell.delta) for cell in sweep.cells).values()
    return Figure(
        name=f"{metric}-by-epsilon",
        title=title,
        caption=repeats_in_words(counts, "run", series, bands=DEVIATION),
        x_label="epsilon",
        y_label="AUC" if metric == "auc" else metric,
        x_log=True,
        y_percent=metric == "accuracy",
        series=tuple(series),
    )


def _at_delta(sweep: Sweep, metric: str, delta: float, role: Role) -> Series:
    """Return the mean of `metric` at each epsilon, for the runs at `delta`.

    If runs are repeated, a band shows one standard deviation.
    """
    groups: dict[float, list[float]] = {}
    for cell in sorted(sweep.cells, key=lambda cell: cell.epsilon):
        if cell.delta == delta:
            groups.setdefault(cell.epsilon, []).append(getattr(cell, metric))
    means = [statistics.fmean(group) for group in groups.values()]
    spreads = [statistics.stdev(group) if len(group) > 1 else 0.0 for group in groups.values()]
    pairs = list(zip(means, spreads, strict=True)) if any(spreads) else []
    return Series(
        name=f"private, delta {delta:g}",
        x=tuple(groups),
        y=tuple(means),
        low=tuple(mean - spread for mean, spread in pairs),
        high=tuple(mean + spread for mean, spread in pairs),
        role=role,
    )


def flat_line(name: str, value: float, ends: tuple[float, float], role: Role) -> Series:
    """Return a series with the same value at both ends of the x axis."""
    return Series(name=name, x=ends, y=(value, value), role=role)


def _sweep_page(sweep: Sweep, figures: tuple[Figure, ...]) -> Page:
    best = max(sweep.summaries, key=lambda summary: summary.accuracy)
    numbers = [
        Number("best accuracy", f"{100 * best.accuracy:.2f} %", f"at epsilon {best.epsilon:g}"),
        Number("runs", str(len(sweep.cells)), "each with its own bill"),
        Number("all of them", f"{sweep.epsilon_of_all:.3f}", "epsilon of releasing every run"),
    ]
    if sweep.baseline is not None:
        value = f"{100 * sweep.baseline['accuracy']:.2f} %"
        numbers.append(Number("without privacy", value, "the same model and features"))
    rows = [
        (f"epsilon {row.epsilon:g}, delta {row.delta:g}", _outcome(row)) for row in sweep.summaries
    ]
    return Page(
        title=f"{sweep.name}: accuracy at several budgets",
        lead="The same recipe at several budgets. Its settings were fixed before the first run.",
        numbers=tuple(numbers),
        figures=figures,
        sections=(
            Section(
                name="runs",
                title="Budget by budget",
                text=(
                    "Each bill holds if that run alone is released. Whoever publishes all of the "
                    f"runs pays epsilon {sweep.epsilon_of_all:.3f}."
                ),
                rows=tuple(rows),
            ),
        ),
        footer="Written by tacit. The numbers are in sweep.json and figures/.",
    )


def _outcome(row: Summary) -> str:
    text = f"accuracy {100 * row.accuracy:.2f} %"
    text += "" if row.spread is None else f" ± {100 * row.spread:.2f} over {row.runs} runs"
    return text + ("" if row.auc is None else f", AUC {row.auc:.4f}")

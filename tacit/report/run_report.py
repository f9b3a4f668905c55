"""From a run folder to its certificate, figures and page."""

import json
import math
from base64 import b64encode
from pathlib import Path
from typing import Any

from tacit.events import Relation
from tacit.experiments import Facts, Metric, RunFolder
from tacit.report.certificate import make_certificate
from tacit.report.figures import Figure, Role, Series, files
from tacit.report.page import Image, Number, Page, Section, cautions, promise, render, strength
from tacit.report.pate_report import answer_figures

CERTIFICATE, REPORT, FIGURES, AUDIT = "certificate.json", "report.html", "figures", "audit.json"


def write_report(folder: str | Path) -> Path:
    """Certificate, figures (CSV) and report.html of a finished run; the page's path."""
    run = RunFolder(folder)
    facts = run.facts()
    certificate = certificate_of(facts, run)
    run.write(CERTIFICATE, json.dumps(certificate, indent=2) + "\n")
    figures = run_figures(facts, run)
    for figure in figures:
        for name, content in files(figure):
            run.write(f"{FIGURES}/{name}", content)
    page = page_of(facts, certificate, figures, _audit_sections(run))
    return run.write(REPORT, render(page))


def certificate_of(facts: Facts, run: RunFolder) -> dict[str, Any]:
    """The sealed certificate of a run."""
    utility = facts.utility
    return make_certificate(
        title=f"{facts.method} on {facts.data}",
        event=facts.claim,
        delta=facts.delta,
        relation=Relation(facts.relation),
        unit=facts.unit,
        n_records=facts.n_records,
        sampling_used=facts.sampling_used,
        data_touches=[
            {"what": f"{touch.what}: {touch.how}", "paid": touch.cost} for touch in facts.touches
        ],
        released=list(facts.released),
        randomness=_randomness(facts),
        utility={
            "metric": utility.metric,
            "private": [one.value for one in utility.private],
            "mean": utility.mean,
            "spread": utility.spread,
            "non_private": [one.value for one in utility.non_private],
            "majority": utility.majority,
            "n_test": utility.n_test,
        },
        software=facts.versions,
        created=facts.created,
        model=run / facts.model_file,
    )


def run_figures(facts: Facts, run: RunFolder) -> tuple[Figure, ...]:
    """Epsilon by epoch, and accuracy and loss by epoch beside the non-private twin."""
    private = run.read_lines(facts.metrics_file)
    if facts.method == "PATE":
        return answer_figures(facts, private)
    twin = [] if facts.baseline_file is None else run.read_lines(facts.baseline_file)
    figures = []
    for metric, title in (("accuracy", "Accuracy"), ("auc", "Area under the ROC curve")):
        if private and metric in private[0]:
            figures.append(_metric_by_epoch(metric, title, private, twin))
    if len(private) > 1:
        figures.append(_epsilon_by_epoch(facts, private))
    return tuple(figures)


def page_of(
    facts: Facts,
    certificate: dict[str, Any],
    figures: tuple[Figure, ...],
    sections: tuple[Section, ...] = (),
) -> Page:
    """What the page of this run says."""
    stated = certificate["claim"]["epsilon"]
    epsilon = math.inf if stated is None else stated
    return Page(
        title=f"{facts.data}: a model that keeps its data to itself",
        lead=(
            f"{facts.model}, trained by {facts.method} on {facts.n_records:,} records. "
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
        promise=promise(epsilon, facts.delta, facts.unit),
        figures=figures,
        sections=(*sections, _levels(facts, epsilon)),
        prices=tuple(certificate["prices"]),
        fields=_fields(facts, epsilon),
        certificate=certificate,
        footer=f"Written by tacit {facts.versions.get('tacit', '')}, run of {facts.created}.",
    )


def _numbers(facts: Facts, epsilon: float) -> tuple[Number, ...]:
    utility = facts.utility
    spread = "" if utility.spread is None else f" ± {100 * utility.spread:.2f} over seeds"
    numbers = [
        Number("epsilon", f"{epsilon:.3f}" if math.isfinite(epsilon) else "∞", "certified bound"),
        Number("delta", f"{facts.delta:g}", f"{facts.n_records:,} records"),
        Number(
            f"private {utility.metric}",
            f"{100 * utility.mean:.2f} %",
            f"on {utility.n_test:,} {_measured(facts)}{spread}",
        ),
    ]
    if utility.non_private:
        mean = sum(one.value for one in utility.non_private) / len(utility.non_private)
        cost = 100 * (mean - utility.mean)
        numbers.append(
            Number("without privacy", f"{100 * mean:.2f} %", f"privacy costs {cost:.2f} points")
        )
    return tuple(numbers)


def _measured(facts: Facts) -> str:
    """Whose records utility was measured on: not to be called public where they are not."""
    is_public = all(t.cost == "public" for t in facts.touches if t.what == "evaluation")
    return "public test records" if is_public else "held-out records, not covered"


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
        ("What is released", "; ".join(facts.released)),
        ("Assumed public", "; ".join(facts.assumed_public)),
        ("Uses of the data", "; ".join(f"{t.what} ({t.cost}): {t.how}" for t in facts.touches)),
        ("Tuning", "; ".join(tuning) or "none on private data"),
        ("Randomness", _randomness(facts)),
        ("Hyperparameters", ", ".join(f"{k} {v}" for k, v in facts.hyperparameters.items())),
        ("Software", ", ".join(f"{k} {v}" for k, v in facts.versions.items())),
    )


def _levels(facts: Facts, epsilon: float) -> Section:
    """The levels of NIST SP 800-226 (2025), section 1 and figure 1: each rests on those below."""
    spread = facts.utility.spread
    seeds = "one run" if spread is None else f"{len(facts.utility.private)} runs"
    return Section(
        name="levels",
        title="What it rests on",
        text=(
            "NIST SP 800-226 orders a claim of differential privacy in levels. A level is worth "
            "no more than the ones below it."
        ),
        rows=(
            (
                "The guarantee",
                f"epsilon {epsilon:.4f} at delta {facts.delta:g} for one {facts.unit} "
                f"({facts.relation.replace('_', ' ')}): {strength(epsilon)}.",
            ),
            (
                "Algorithm and utility",
                f"{facts.method}, priced by an accountant with certified error; utility of {seeds} "
                f"on {facts.utility.n_test:,} {_measured(facts)}, as a mean over all of them: "
                "differences between groups of people are not measured here.",
            ),
            (
                "Implementation",
                f"Trust model: {facts.trust}. Noise: {_randomness(facts)}, drawn in floating "
                "point, while prices are those of exact arithmetic. Timing is not hidden.",
            ),
            (
                "Collection and access",
                "Outside this page: who collected the records, who may read them, and how long "
                "they are kept. The run folder holds none of them, and the key of its noise was "
                "removed when the run ended.",
            ),
        ),
    )


def _randomness(facts: Facts) -> str:
    if isinstance(facts.seed, int):
        return f"seed {facts.seed}: the noise is reproducible"
    return "OS entropy"


def _epsilon_by_epoch(facts: Facts, rows: list[Metric]) -> Figure:
    points = [(row["epoch"], row["epsilon"]) for row in rows if "epsilon" in row]
    x, y = zip(*points, strict=True)
    return Figure(
        name="epsilon-by-epoch",
        title="What each epoch costs",
        caption=f"Epsilon at delta {facts.delta:g} of a run planned to end there.",
        x_label="epoch",
        y_label="epsilon",
        series=(Series(name="epsilon spent", x=x, y=y),),
    )


def _metric_by_epoch(metric: str, title: str, private: list[Metric], twin: list[Metric]) -> Figure:
    def series(name: str, rows: list[Metric], role: Role) -> Series:
        kept = [(row["epoch"], row[metric]) for row in rows if metric in row]
        x, y = zip(*kept, strict=True)
        return Series(name=name, x=x, y=y, role=role)

    drawn, end = [series("private", private, Role.PRIVATE)], ""
    beside = [row for row in twin if row["epoch"] <= private[-1]["epoch"] and metric in row]
    if beside:  # a twin that was trained for longer would press the private run together
        drawn.append(series("without privacy", beside, Role.BASELINE))
        last = f"{twin[-1][metric]:.2%}" if metric == "accuracy" else f"{twin[-1][metric]:.4f}"
        end = f" Without privacy it ends at {last} after {twin[-1]['epoch']:.3g} epochs."
    return Figure(
        name=f"{metric}-by-epoch",
        title=f"{title} on records not trained on",
        caption=f"Both models see the same records; one of them keeps them to itself.{end}",
        x_label="epoch",
        y_label=metric,
        y_percent=metric == "accuracy",
        series=tuple(drawn),
    )


def _audit_sections(run: RunFolder) -> tuple[Section, ...]:
    """What an audit left behind, if there was one."""
    path = run / AUDIT
    if not path.is_file():
        return ()
    audit = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        (
            bound["method"],
            f"epsilon at least {bound['epsilon_lower']:.3f} with {100 * bound['confidence']:g} % "
            f"confidence ({bound['n_canaries']:,} canaries; assumes {bound['assumes']})",
        )
        for bound in audit.get("bounds", ())
    ]
    rows += [
        (
            "the bill itself",
            f"p-value {test['p_value']:.3g} against its own curve (assumes {test['assumes']})",
        )
        for test in audit.get("tests", ())
    ]
    shown = (audit.get("demonstrations") or {}).get("figures", {})
    return (
        Section(
            name="audit",
            title="What attacks reach",
            text=(
                "A lower bound on epsilon from attacking the run. It must stay below the bill; "
                "if it passes the bill, something is broken."
            ),
            rows=tuple(rows),
            images=tuple(
                Image(_inline(path), caption)
                for file, caption in shown.items()
                if (path := run / FIGURES / Path(file).name).is_file()
            ),
        ),
    )


def _inline(path: Path) -> str:
    """A PNG as a data address: the page is one file."""
    return f"data:image/png;base64,{b64encode(path.read_bytes()).decode()}"

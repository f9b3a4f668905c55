"""Figures of a PATE run: what the answers cost and what they taught, as they grew in number.

Both follow from released labels alone. Gaps between votes are private and are not drawn.
"""

from tacit.experiments import Facts, Metric
from tacit.report.figures import Figure, Series


def answer_figures(facts: Facts, rows: list[Metric]) -> tuple[Figure, ...]:
    """Epsilon and accuracy by number of answered queries; none if fewer than two points."""
    if len(rows) < 2:
        return ()
    answers = tuple(row["answers"] for row in rows)
    return (
        Figure(
            name="epsilon-by-answers",
            title="What the answers cost",
            caption=f"Epsilon at delta {facts.delta:g} for any data, after so many answers.",
            x_label="answered queries",
            y_label="epsilon",
            series=(Series(name="epsilon", x=answers, y=tuple(row["epsilon"] for row in rows)),),
        ),
        Figure(
            name="accuracy-by-answers",
            title="What the answers taught",
            caption="A student taught with the first so many answers, on public test records.",
            x_label="answered queries",
            y_label="accuracy",
            y_percent=True,
            series=(Series(name="student", x=answers, y=tuple(row["accuracy"] for row in rows)),),
        ),
    )

"""The same PATE recipe with one setting varied: the figures of its trade-offs.

Every point is a run of its own, with a folder and, unless one is given that pays for all, a ledger
of its own. On one private data set the runs add up: a sweep on data that are not public costs the
sum of its points.
"""

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tacit.experiments.pate import PATERecipe, refuse_other_recipe, run_pate
from tacit.experiments.run import RunFolder

VARIED = {"teachers": "teachers.count", "noise": "answers.noise", "queries": "answers.queries"}


class Point(NamedTuple):
    """What came of one value."""

    value: float
    accuracy: float
    epsilon: float
    answered: int


def sweep_pate(
    recipe: PATERecipe,
    setting: str,
    values: Sequence[float],
    folder: str | Path,
    *,
    data: str | Path | None = None,
    ledger: str | Path | None = None,
    tell: Callable[[Point], None] = lambda _: None,
) -> list[Point]:
    """Run `recipe` at each of `values` of `setting` ("teachers", "noise" or "queries").

    Writes `sweep.jsonl` and `sweep.csv`, and `sweep.png` where matplotlib is installed. A point
    whose run has finished is not run again.
    """
    if setting not in VARIED:
        raise ValueError(f"setting must be one of {', '.join(VARIED)}, got {setting!r}.")
    points = []
    for value in values:
        number = value if setting == "noise" else int(value)
        run = RunFolder(Path(folder) / f"{setting}-{number:g}")
        varied = recipe.changed({VARIED[setting]: number})
        refuse_other_recipe(varied, run)
        facts = (
            run.facts() if run.is_finished else run_pate(varied, run.path, data=data, ledger=ledger)
        )
        answered = int(facts.utility.others["answered"])
        points.append(Point(float(number), facts.utility.mean, facts.epsilon, answered))
        tell(points[-1])
    _write(RunFolder(folder), setting, points)
    return points


def _write(folder: RunFolder, setting: str, points: list[Point]) -> None:
    rows = [{setting: point.value, **point._asdict()} for point in points]
    folder.write("sweep.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([setting, "accuracy", "epsilon", "answered"])
    writer.writerows(points)
    folder.write("sweep.csv", text.getvalue())
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots(1, 2)
    axes[0].plot([p.value for p in points], [100 * p.accuracy for p in points], "o-")
    axes[0].set(xlabel=setting, ylabel="student accuracy, %")
    axes[1].plot([p.value for p in points], [p.epsilon for p in points], "o-")
    axes[1].set(xlabel=setting, ylabel="epsilon")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    folder.write("sweep.png", image.getvalue())

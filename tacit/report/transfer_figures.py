"""Figures of a transfer: what the other tables changed, and how well each agrees with the target.

Both show released values alone.
"""

from typing import Any

from tacit.report.figures import Figure, Role, Series


def transfer_figures(fitted: dict[str, Any]) -> tuple[Figure, ...]:  # Any: JSON values
    """Return the figures of a transfer's model.json."""
    return _coefficients(fitted), _agreement(fitted)


def _coefficients(fitted: dict[str, Any]) -> Figure:
    names, numbers = list(fitted["alone"]), range(1, len(fitted["alone"]) + 1)

    def series(name: str, values: dict[str, float], role: Role) -> Series:
        y = tuple(values[one] for one in names)
        return Series(name=name, x=tuple(numbers), y=y, role=role, is_line=False)

    listed = ", ".join(f"{k} {name}" for k, name in zip(numbers, names, strict=True))
    return Figure(
        name="coefficients",
        title="What the other tables changed",
        caption=f"Coefficients in the units of the file: {listed}.",
        x_label="coefficient",
        y_label="value",
        series=(
            series("target alone", fitted["alone"], Role.BASELINE),
            series("with the other tables", fitted["coefficients"], Role.PRIVATE),
        ),
    )


def _agreement(fitted: dict[str, Any]) -> Figure:
    measured = [one for one in fitted["misfits"] if one["misfit"] is not None]
    numbers = [k + 1 for k, one in enumerate(fitted["misfits"]) if one["misfit"] is not None]
    ends = (1.0, float(max(2, len(fitted["misfits"]))))
    listed = ", ".join(f"{k} {one['source']}" for k, one in zip(numbers, measured, strict=True))
    sources = Series(
        name="other tables", x=tuple(numbers), y=tuple(one["misfit"] for one in measured),
        role=Role.PRIVATE, is_line=False,
    )  # fmt: skip
    return Figure(
        name="agreement",
        title="How well each table agrees with the target",
        caption="Misfit relative to the most that noise explains; above 1 a table is not used. "
        f"{listed}.",
        x_label="table",
        y_label="misfit",
        series=(sources, Series(name="most", x=ends, y=(1.0, 1.0), role=Role.BOUND)),
    )

"""`tacit local`: what a server learns if every row of a table is sent by its own person."""

import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacit.cli import _shared as shared

if TYPE_CHECKING:
    from tacit.local import LocalRandomizer

OTHER = "(other)"


def local(
    table: Annotated[Path, typer.Argument(help="CSV file with a header; one row per person.")],
    *,
    column: Annotated[str, typer.Option(help="Column that each person reports.")],
    epsilon: Annotated[float, typer.Option("--epsilon", help="Local privacy of one report.")],
    options: Annotated[
        str | None, typer.Option(help="Possible answers, separated by commas; others are pooled.")
    ] = None,
    lower: Annotated[float | None, typer.Option(help="Lower bound of a number.")] = None,
    upper: Annotated[float | None, typer.Option(help="Upper bound of a number.")] = None,
    quantiles: Annotated[
        str | None, typer.Option(help="Probabilities, separated by commas, instead of the mean.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Also print epsilon at this delta if reports are shuffled.")
    ] = None,
    confidence: Annotated[float, typer.Option(help="Confidence of each interval.")] = 0.95,
    seed: shared.Seed = None,
    as_json: shared.AsJson = False,
) -> None:
    """Simulate persons who each send one noisy report, and print the estimate of the server.

    Give --options for the frequencies of answers, or --lower and --upper for the mean or the
    quantiles of a number. Options and bounds are declared, never taken from the file.

    \b
    Example:
      tacit local people.csv --column education --options school,college --epsilon 1
      tacit local people.csv --column age --lower 0 --upper 100 --epsilon 1 --delta 1e-6
    """
    values = _read(table, column)
    if options is not None and lower is None and upper is None and quantiles is None:
        names = [name.strip() for name in options.split(",") if name.strip()]
        facts, randomizer = _frequencies(values, names, epsilon, confidence, seed)
    elif options is None and lower is not None and upper is not None:
        wanted = None if quantiles is None else shared.numbers(quantiles, "--quantiles")
        facts, randomizer = _numbers(values, (lower, upper), wanted, epsilon, confidence, seed)
    else:
        raise ValueError("give --options, or --lower and --upper (with --quantiles if wanted).")
    facts |= {"n_reports": len(values), "epsilon": epsilon, "event": randomizer.event.to_dict()}
    if delta is not None:
        from tacit.accounting import epsilon as price

        facts |= {"delta": delta, "shuffled_epsilon": price(
            randomizer.shuffled(len(values)), delta=delta
        )}  # fmt: skip
    _show(facts, as_json)


def _read(table: Path, column: str) -> list[str]:
    with table.open(newline="", encoding="utf-8") as lines:
        rows = csv.DictReader(lines)
        if column not in (rows.fieldnames or ()):
            raise ValueError(f"{table.name} has no column {column!r}.")
        values = [(row[column] or "").strip() for row in rows]
    if not values:
        raise ValueError(f"{table.name} has no rows.")
    return values


Found = tuple[dict[str, Any], "LocalRandomizer"]  # Any: JSON values of several types


def _frequencies(
    values: list[str], names: list[str], epsilon: float, confidence: float, seed: int | None
) -> Found:
    from tacit.local import choose_oracle

    names = [*names, OTHER]
    if len(set(names)) < len(names):
        raise ValueError(f"--options must be different from each other and from {OTHER!r}.")
    place = {name: index for index, name in enumerate(names)}
    oracle = choose_oracle(len(names), epsilon)
    encoded = [place.get(value, len(names) - 1) for value in values]
    found = oracle.estimate(oracle.randomize(encoded, rng=seed), confidence=confidence)
    rows = zip(names, found.values, found.lower, found.upper, strict=True)
    return {"method": oracle.name, "estimates": _rows(rows)}, oracle


def _numbers(
    values: list[str],
    bounds: tuple[float, float],
    wanted: list[float] | None,
    epsilon: float,
    confidence: float,
    seed: int | None,
) -> Found:
    from tacit.local import HybridMean, LocalQuantiles

    numbers = [_number(value) for value in values]
    lower, upper = bounds
    if wanted is None:
        mean = HybridMean(epsilon=epsilon, lower=lower, upper=upper)
        found = mean.estimate(mean.randomize(numbers, rng=seed), confidence=confidence)
        row = ("mean", float(found.values), float(found.lower), float(found.upper))
        return {"method": "hybrid mean", "estimates": _rows([row])}, mean
    tree = LocalQuantiles(epsilon=epsilon, lower=lower, upper=upper)
    reports = tree.randomize(numbers, rng=seed)
    quantile = tree.estimate(reports, wanted, confidence=confidence)
    names = [f"quantile {probability:g}" for probability in wanted]
    rows = zip(names, quantile.values, quantile.lower, quantile.upper, strict=True)
    return {"method": "tree of histograms", "estimates": _rows(rows)}, tree


def _number(text: str) -> float:
    """Return the number in `text`, or NaN: an unreadable value must not stop the simulation."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _rows(rows: Any) -> dict[str, dict[str, float]]:  # Any: names with three floats each
    return {
        name: {"estimate": float(value), "lower": float(low), "upper": float(high)}
        for name, value, low, high in rows
    }


def _show(facts: dict[str, Any], as_json: bool) -> None:  # Any: JSON values of several types
    if as_json:
        shared.print_json(facts)
        return
    width = max(len(name) for name in facts["estimates"])
    typer.echo(f"{'':<{width}}  {'estimate':>10}  {'lower':>10}  {'upper':>10}")
    for name, row in facts["estimates"].items():
        numbers = "  ".join(f"{row[key]:>10.5g}" for key in ("estimate", "lower", "upper"))
        typer.echo(f"{name:<{width}}  {numbers}")
    typer.echo(
        f"{facts['n_reports']:,} reports by {facts['method']}; "
        f"each report is epsilon = {shared.round_up(facts['epsilon'], 6)} locally private"
    )
    if "shuffled_epsilon" in facts:
        typer.echo(
            f"if a shuffler hides who sent which report: epsilon = "
            f"{shared.round_up(facts['shuffled_epsilon'], 6)} at delta = {facts['delta']:g}"
        )

"""What the accounting verbs share: option types, the event they price, numbers rounded safely."""

import json
import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Annotated, Any

import typer

from tacit import events as ev
from tacit._check import whole
from tacit.sampling import Poisson


def _count(text: str) -> int:
    """A whole number, also as 10_000 or 1e6."""
    try:
        number = float(text)
        if number != int(number):
            raise ValueError
        return int(text) if text.strip().isdecimal() else int(number)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a whole number.") from None


RATE_HELP = "Probability with which a record takes part in one step."
NOISE_HELP = "Noise standard deviation over the clipping norm."
STEPS_HELP = "Number of steps."
Rate = Annotated[float, typer.Option("--rate", help=RATE_HELP)]
NoiseMultiplier = Annotated[float, typer.Option("--noise-multiplier", help=NOISE_HELP)]
Steps = Annotated[int, typer.Option("--steps", parser=_count, metavar="INTEGER", help=STEPS_HELP)]
Delta = Annotated[float, typer.Option("--delta", help="Well below 1 / number of records.")]
Relation = Annotated[ev.Relation, typer.Option("--relation", help="Which data sets are neighbors.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]

MaybeRate = Annotated[float | None, typer.Option("--rate", help=RATE_HELP)]
MaybeNoise = Annotated[float | None, typer.Option("--noise-multiplier", help=NOISE_HELP)]
MaybeSteps = Annotated[
    int | None, typer.Option("--steps", parser=_count, metavar="INTEGER", help=STEPS_HELP)
]


def sgd(rate: float, noise_multiplier: float, steps: int) -> ev.Event:
    """DP-SGD as an event: `steps` Gaussian releases, each on a fresh Poisson sample."""
    step = Poisson(rate).amplify(ev.Gaussian(noise_multiplier))
    return ev.Repeated(step, whole(steps=steps))


def numbers(text: str, option: str) -> list[float]:
    """The numbers in a comma-separated option."""
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise typer.BadParameter(f"{option} must be numbers with commas, got {text!r}.") from None


def round_up(value: float, digits: int = 6) -> str:
    """`value` to `digits` significant digits, never below it.

    >>> round_up(0.94686683), round_up(2.0), round_up(math.inf)
    ('0.946867', '2', 'infinity')
    """
    return _rounded(value, digits, ROUND_CEILING)


def round_down(value: float, digits: int = 6) -> str:
    """`value` to `digits` significant digits, never above it.

    >>> round_down(0.94686676), round_down(123456789.0)
    ('0.946866', '123456000')
    """
    return _rounded(value, digits, ROUND_FLOOR)


def print_json(data: dict[str, Any]) -> None:  # Any: JSON values have no narrower common type
    """`data` as one JSON object; what is infinite becomes null, since JSON has no infinity."""
    typer.echo(json.dumps(_finite(data), indent=2, allow_nan=False, ensure_ascii=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rounded(value: float, digits: int, rounding: str) -> str:
    if not math.isfinite(value):
        return "infinity" if value > 0 else str(value)
    context = Context(prec=digits, rounding=rounding)
    number = float(context.create_decimal(repr(float(value))))
    text = f"{number:.{digits}g}"
    return text if "e-" in text else f"{number:.15g}"

"""Code that several verbs share: option types, DP-SGD as an event, training, printing."""

import hashlib
import json
import math
import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacit import events as ev
from tacit._check import whole
from tacit.sampling import Poisson

if TYPE_CHECKING:
    from tacit.experiments import Facts, Recipe
    from tacit.ledger import Ledger


_STEERING = re.compile("[\\x7f-\\x9f\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u2069\\ufeff]")


def count(text: str) -> int:
    """Return the whole number in the text of an option; 10_000 and 1e6 are accepted forms."""
    try:
        number = float(text)
        if number != int(number):
            raise ValueError
        return int(text) if text.strip().isdecimal() else int(number)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a whole number.") from None


_RATE = typer.Option("--rate", help="Probability that a given record takes part in one step.")
_NOISE = typer.Option("--noise-multiplier", help="Noise standard deviation / clipping norm.")
_STEPS = typer.Option("--steps", parser=count, metavar="INTEGER", help="Number of steps.")
DELTA_HELP = "Delta of the guarantee, well below 1 / number of records."
_RECORDS = typer.Option("--records", parser=count, metavar="INTEGER", help="Number of records.")
_BATCH = typer.Option("--batch-size", parser=count, metavar="INTEGER", help="Records in a step.")
MaybeRecords = Annotated[int | None, _RECORDS]
MaybeBatch = Annotated[int | None, _BATCH]
MaybeEpochs = Annotated[float | None, typer.Option("--epochs", help="Passes over the records.")]
Rate = Annotated[float, _RATE]
MaybeRate = Annotated[float | None, _RATE]
NoiseMultiplier = Annotated[float, _NOISE]
MaybeNoise = Annotated[float | None, _NOISE]
Steps = Annotated[int, _STEPS]
MaybeSteps = Annotated[int | None, _STEPS]
Epsilon = Annotated[float, typer.Option(help="Largest epsilon allowed.")]
MaybeEpsilon = Annotated[float | None, typer.Option(help="Largest epsilon [the recipe's].")]
Delta = Annotated[float, typer.Option(help=DELTA_HELP)]
LostSteps = Annotated[
    str,
    typer.Option(help="Beyond the reserve of an interrupted run: pay, or skip. Default: stop."),
]
MaybeDelta = Annotated[float | None, typer.Option(help=DELTA_HELP)]
Relation = Annotated[ev.Relation, typer.Option(help="How two neighboring data sets differ.")]
MaybeRelation = Annotated[
    ev.Relation | None, typer.Option(help="How neighboring tables differ [the ledger's].")
]
RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a built-in recipe.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: training.epochs=20."),
]
Epsilons = Annotated[str, typer.Option(help="Budgets, separated by commas.")]
Repeats = Annotated[int, typer.Option(min=1, help="Runs at each budget.")]
Root = Annotated[Path | None, typer.Option(help="Folder of the data sets [$TACIT_DATA].")]
Out = Annotated[Path | None, typer.Option(help="Folder to write to.")]
Seed = Annotated[int | None, typer.Option(help="For tests only: a known seed reveals the noise.")]
LedgerFile = Annotated[Path | None, typer.Option(help="Ledger file that pays for the releases.")]
WithPage = Annotated[bool, typer.Option(help="Write report.html beside certificate.json.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
TrustCode = Annotated[
    list[str] | None,
    typer.Option(
        "--trust-code",
        metavar="MODULE",
        help="Let the recipe or model file import this module and run its code.",
    ),
]


def sgd(rate: float, noise_multiplier: float, steps: int) -> ev.Event:
    """Return the event of DP-SGD: `steps` Gaussian releases, each on a fresh Poisson sample."""
    step = Poisson(rate).amplify(ev.Gaussian(noise_multiplier))
    return ev.Repeated(step, whole(steps=steps))


def rate_and_steps(
    rate: float | None,
    steps: int | None,
    *,
    records: int | None,
    batch_size: int | None,
    epochs: float | None,
) -> tuple[float | None, int | None]:
    """Return rate and steps, where records, batch size and epochs may stand for them."""
    if batch_size is not None or epochs is not None:
        if records is None or batch_size is None:
            raise ValueError("--batch-size and --epochs need --records and --batch-size.")
        if not 1 <= batch_size <= records:
            raise ValueError(f"--batch-size must be from 1 to the {records} records.")
        if rate is not None or (steps is not None and epochs is not None):
            raise ValueError("give --rate and --steps, or --records, --batch-size and --epochs.")
        rate = batch_size / records
        if epochs is not None:
            if not 0 < epochs < math.inf:
                raise ValueError(f"--epochs must be a positive number, got {epochs}.")
            steps = math.ceil(epochs * records / batch_size)
    return rate, steps


def require_ledger(path: Path) -> None:
    """Raise if the ledger file of an option does not exist."""
    if not path.is_file():
        raise ValueError(
            f"there is no ledger at {path}. Create it with: "
            f"tacit ledger create {path} --epsilon NUMBER --delta NUMBER"
        )


def require_folder(folder: Path) -> None:
    """Raise if `folder` cannot be written to, before anything is paid for."""
    if folder.suffix == ".json":
        raise ValueError("--out is a run folder; the model will be in model.json inside it.")
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):  # more certain than the folder's permissions
            pass
    except OSError as closed:
        raise ValueError(f"--out {folder} cannot be written: {closed.strerror}.") from None


def require_file(path: Path) -> None:
    """Raise if the file `path` cannot be written."""
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder: name a file.")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"--out {path} cannot be written: its folder is missing or closed.")


def numbers(text: str, option: str) -> list[float]:
    """Return the numbers of a comma-separated option; `option` is its name, for error messages."""
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise typer.BadParameter(f"{option} must be numbers with commas, got {text!r}.") from None


def recipe_of(
    name: str, settings: list[str] | None, *, trust_code: list[str] | None = None, **changes: Any
) -> "Recipe":
    """Read the recipe `name` and change settings: first those of `--set`, then `changes`.

    `trust_code` lists modules whose code the recipe may run (`Recipe.parse`). `changes` holds the
    values of other options, named like settings with `__` for the dot. None leaves a setting as it
    is.
    """
    from tacit.experiments import Recipe

    trusted = trust_code or ()
    recipe = with_settings(Recipe.read(name, trust_code=trusted), settings, **changes)
    recipe.require_trusted(trusted)
    return recipe


def with_settings(recipe: "Recipe", settings: list[str] | None, **changes: Any) -> "Recipe":
    """Return the recipe with settings changed: those of `--set`, then `changes`."""
    chosen: dict[str, Any] = dict(_setting(text) for text in settings or ())
    chosen |= {key.replace("__", "."): v for key, v in changes.items() if v is not None}
    return recipe.with_settings(chosen)


def _setting(text: str) -> tuple[str, Any]:  # Any: a TOML value
    key, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} must be KEY=VALUE, as in training.epochs=20.")
    try:
        return key.strip(), tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()  # text without quotes


def train_and_print(
    recipe: "Recipe",
    folder: Path,
    *,
    root: Path | None = None,
    page: bool,
    as_json: bool,
    progress: bool | None = None,
    lost_steps: str = "reserve",
    verb: str = "train",
    train: "Callable[..., Facts] | None" = None,
) -> None:
    """Train by a recipe into `folder`, write its report page if `page`, and print the result.

    `train` is what trains, by default `tacit.experiments.train`; `verb` is its command.
    """
    from tacit.experiments import Progress

    if train is None:
        from tacit.experiments import train

    if rank() > 0:  # rank 0 prints
        with _ranks_together():
            train(recipe, folder, root=root, lost_steps=lost_steps)
        return
    is_hidden, is_forced = as_json if progress is None else not progress, progress is True
    bar = progress_bar(recipe.name, is_hidden=is_hidden, is_forced=is_forced)
    with bar as show, _ranks_together():

        def report(progress: Progress) -> None:
            metric, text = progress.metric, progress.doing
            if metric:
                text = f"epsilon {metric['epsilon']:.3f}"
                text += f"  accuracy {metric['accuracy']:.2%}" if "accuracy" in metric else ""
                text += f"  perplexity {metric['perplexity']:.2f}" if "perplexity" in metric else ""
                if "training_loss" in metric:
                    text += f"  noisy loss {metric['training_loss']:.3f}"
            show(progress.step, progress.steps, text)

        try:
            facts = train(recipe, folder, root=root, on_progress=report, lost_steps=lost_steps)
        except KeyboardInterrupt:
            typer.echo(f"\ninterrupted; you can go on with: tacit {verb} {folder}", err=True)
            raise typer.Exit(130) from None
    written = write_results(folder, page=page)
    if as_json:
        print_json(outcome(facts, folder, written))
    else:
        _print_outcome(facts, folder, written)


def rank() -> int:
    """Return the number of this process among those that torchrun started; 0 without torchrun."""
    return int(os.environ.get("RANK", "0")) if "TORCHELASTIC_RUN_ID" in os.environ else 0


@contextmanager
def _ranks_together() -> Iterator[None]:
    """Join the processes that torchrun started, so that they train one model in one run."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("WORLD_SIZE") == "1":
        yield
        return
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(hours=12))  # torchrun ends us, if one dies
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            raise
        raise OSError(
            "another rank ended. Start torchrun again, with any number of ranks, to resume."
        ) from None
    finally:
        dist.destroy_process_group()


@contextmanager
def paying(
    path: Path | None, seed: int | None, *, files: list[Path], settings: object
) -> Iterator["tuple[Ledger | None, int | None]"]:
    """Open the ledger at `path`, and yield it with the seed of the noise.

    If the command is killed after it has paid, and is started again with the same `files` and
    `settings`, it repeats the same noise and pays nothing (`tacit.ledger.paid_once`).
    """
    from tacit.ledger import Ledger, paid_once

    if path is None:
        yield None, seed
        return
    parts = [hashlib.sha256(file.read_bytes()).digest() for file in files]
    with Ledger(path) as ledger, paid_once(ledger, *parts, repr(settings).encode()) as fresh:
        yield ledger, fresh if seed is None else seed


@contextmanager
def progress_bar(
    label: str, *, is_hidden: bool, is_forced: bool = False
) -> Iterator[Callable[[float, float, str], None]]:
    """Show a progress bar on standard error, if that is a terminal or `is_forced`.

    Yields a function that updates the bar: it takes the amount done, the total, and a text.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, force_terminal=is_forced or None)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    is_off = is_hidden or not console.is_terminal
    with Progress(*columns, console=console, disable=is_off) as bar:
        task = bar.add_task(label, total=1, text="")
        yield lambda done, total, text="": bar.update(task, completed=done, total=total, text=text)


def write_page(folder: Path) -> Path | None:
    """Write the report page of a run or sweep and return its path; without jinja2, return None."""
    from tacit import report

    try:
        return report.write_page(folder)
    except ModuleNotFoundError as missing:
        typer.echo(f"no page: install 'tacit-dp[report]' for {missing.name}.", err=True)
        return None


def write_results(folder: Path, *, page: bool) -> Path | None:
    """Write certificate.json of a finished run, and its page if asked for; return the page's path.

    Without a page, or without jinja2, the certificate is written all the same.
    """
    from tacit import report
    from tacit.experiments import RunFolder

    written = write_page(folder) if page else None
    if written is None:
        report.write_certificate(RunFolder(folder))
    return written


def round_up(value: float, digits: int = 6) -> str:
    """Return `value` with `digits` significant digits, never below the value itself.

    >>> round_up(0.94686683), round_up(2.0), round_up(math.inf)
    ('0.946867', '2', 'infinity')
    """
    return _rounded(value, digits, ROUND_CEILING)


def round_down(value: float, digits: int = 6) -> str:
    """Return `value` with `digits` significant digits, never above the value itself.

    >>> round_down(0.94686676), round_down(123456789.0)
    ('0.946866', '123456000')
    """
    return _rounded(value, digits, ROUND_FLOOR)


def print_json(data: dict[str, Any]) -> None:  # Any: JSON values have no narrower common type
    """Print `data` as one JSON object. Infinity is written as null: JSON cannot express it."""
    text = json.dumps(_finite(data), indent=2, allow_nan=False, ensure_ascii=False)
    # JSON escapes some control characters; those above U+007F could still steer a terminal.
    typer.echo(_STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def outcome(facts: "Facts", folder: Path, page: Path | None) -> dict[str, Any]:  # Any: JSON values
    """Return what a verb that trains prints as JSON."""
    utility = facts.utility
    return {
        "epsilon": facts.epsilon,
        "delta": facts.delta,
        "relation": facts.relation,
        utility.metric: utility.private[0].value if utility.private else None,
        "intervals": utility.intervals,
        "non_private_accuracy": utility.non_private[0].value if utility.non_private else None,
        "majority_accuracy": utility.majority,
        "metrics": utility.others,
        "steps": facts.steps,
        "resumed": facts.resumed,
        "noise_multiplier": facts.hyperparameters.get("noise_multiplier"),
        "seconds": facts.seconds,
        "run": str(folder),
        "page": None if page is None else str(page),
    }


def _print_outcome(facts: "Facts", folder: Path, page: Path | None) -> None:
    typer.echo(
        f"epsilon   {round_up(facts.epsilon)} at delta {facts.delta:g} "
        f"({facts.relation}, one {facts.unit} of {facts.n_records:,})"
    )
    typer.echo(utility_line(facts))
    typer.echo(f"run       {folder}")
    if page is not None:
        typer.echo(f"page      {page}")


def utility_line(facts: "Facts") -> str:
    """Return one line about the quality of a run's model, with what is known of its error."""
    utility = facts.utility
    if utility.mean is None:
        return f"quality   not measured: {facts.unmeasured}"
    is_share = utility.metric == "accuracy"
    shown = (lambda value: f"{value:.2%}") if is_share else (lambda value: f"{value:.4f}")
    line = f"{utility.metric:<9} {shown(utility.private[0].value)}"
    if utility.metric in utility.intervals:
        low, high = utility.intervals[utility.metric]
        line += f"   95 % interval {shown(low)} to {shown(high)}, measured with paid noise"
    if utility.non_private:
        line += f"   without privacy {shown(utility.non_private[0].value)}"
    if utility.majority is not None:
        line += f"   commonest class {shown(utility.majority)}"
        if utility.intervals:
            line += ": what a constant answer reaches"
    if "auc" in utility.intervals:
        low, high = utility.intervals["auc"]
        line += "\nAUC       "
        if low <= 0 and high >= 1:
            line += "not measured: the noise was too large to state it"
        else:
            line += f"{utility.others['auc']:.4f}   95 % interval {low:.4f} to {high:.4f}"
    return line


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

"""`tacit experiment`: many fits of a public table, and one figure of what they show."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tacit.cli import _shared as shared
from tacit.cli import _tables as tables
from tacit.cli._options import expanded

if TYPE_CHECKING:
    from tacit.experiments import Recipe, Study, StudyTerms

app = typer.Typer(
    help="Show how a method's error depends on its budget or settings, in one figure.\n\n"
    "Fits many private models and measures them without noise, so use public records: --public.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)
TableOrRecipe = Annotated[
    str, typer.Argument(metavar="TABLE", help="A table with --schema, or a recipe of a table.")
]


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Options of all experiments."""

    schema: tables.MaybeSchema = None
    public: tables.Public = False
    delta: shared.Delta = 1e-6
    repeats: Annotated[int, typer.Option(min=1, help="Fits at each point.")] = 9
    data: shared.Root = None
    ledger: shared.LedgerFile = None
    seed: shared.Seed = None
    out: shared.Out = None
    as_json: shared.AsJson = False

    def recipe(self, name: str) -> "Recipe":
        """Return the recipe of the table `name`, or the recipe of that name."""
        from tacit.experiments import Recipe

        if self.schema is None and not tables.is_table(name):
            recipe = Recipe.read(name)
            if recipe.data.name != "table":
                raise ValueError(f"{name} has no table: experiments fit tables.")
            return recipe.with_settings({"data.is_public": True} if self.public else {})
        if self.schema is None:
            raise ValueError("a table needs --schema FILE.")
        options = tables.RecipeOptions(schema=self.schema, public=self.public)
        return Recipe.from_dict(tables.table_settings(Path(name), options), method="regression")

    @contextmanager
    def terms(self, label: str) -> "Iterator[StudyTerms]":
        """Give the options that all studies take, with a progress bar and an open ledger."""
        from tacit.ledger import Ledger

        with shared.progress_bar(label, is_hidden=self.as_json) as show:

            def on_fit(done: int, total: int) -> None:
                show(done, total, "")

            terms: StudyTerms = {"repeats": self.repeats, "seed": self.seed, "on_fit": on_fit}
            if self.ledger is None:
                yield terms
                return
            shared.require_ledger(self.ledger)
            with Ledger(self.ledger) as ledger:
                yield {**terms, "ledger": ledger}

    def show(self, study: "Study", name: str) -> None:
        """Write the page of a study, and print its points and the price of all fits."""
        from statistics import fmean, stdev

        from tacit.report import cost_in_words, write_study

        page = write_study(study, self.out or Path("runs") / f"{name}-{study.name}")
        if self.as_json:
            shared.print_json(study.to_dict() | {"page": str(page)})
            return
        typer.echo(f"{study.x_label:>20}  {study.y_label}")
        for curve in study.curves:
            typer.echo(curve.name)
            for x, errors in zip(curve.x, curve.errors, strict=True):
                spread = f" ± {stdev(errors):.4g}" if len(errors) > 1 else ""
                typer.echo(f"{x:>20g}  {fmean(errors):.4g}{spread}")
        for label, error in study.without_privacy.items():
            typer.echo(f"{label}: {error:.4g}")
        typer.echo(cost_in_words(study))
        typer.echo(f"page      {page}")


@app.command()
@expanded
def functional(
    table: TableOrRecipe,
    *,
    epsilons: shared.Epsilons = "0.1,0.3,1,3,10",
    split: Annotated[
        str,
        typer.Option(help="Shares of epsilon for the quadratic part, with commas [by default]."),
    ] = "",
    given: StudyOptions,
) -> None:
    """Loss against epsilon by the functional mechanism, for several splits of the budget.

    \b
    Example:
      tacit experiment functional housing.csv --schema housing.toml --public --split 0.2,0.5,0.8
    """
    from tacit.experiments import read_study_table, study_functional

    recipe = given.recipe(table)
    with given.terms("functional mechanism") as terms:
        study = study_functional(
            read_study_table(recipe.data, given.data),
            epsilons=shared.numbers(epsilons, "--epsilons"),
            splits=shared.numbers(split, "--split") or (None,),
            delta=given.delta,
            **terms,
        )
    given.show(study, recipe.name)


@app.command("frank-wolfe")
@expanded
def frank_wolfe(
    table: TableOrRecipe,
    *,
    epsilons: shared.Epsilons = "0.3,1,3,10",
    radius: Annotated[
        str, typer.Option(help="Radii of l1 balls, separated by commas [by default].")
    ] = "",
    vertices: Annotated[
        Path | None,
        typer.Option(help="CSV file of the vertices of another polytope, one per line."),
    ] = None,
    steps: shared.MaybeSteps = None,
    given: StudyOptions,
) -> None:
    """Loss against epsilon by private Frank-Wolfe over an l1 ball or another polytope.

    \b
    Example:
      tacit experiment frank-wolfe people.csv --schema people.toml --public --radius 1,2,5
    """
    from tacit.experiments import read_study_table, read_vertices, study_frank_wolfe

    recipe = given.recipe(table)
    with given.terms("Frank-Wolfe") as terms:
        study = study_frank_wolfe(
            read_study_table(recipe.data, given.data),
            epsilons=shared.numbers(epsilons, "--epsilons"),
            radii=shared.numbers(radius, "--radius") or (None,),
            vertices=None if vertices is None else read_vertices(vertices),
            steps=steps,
            delta=given.delta,
            **terms,
        )
    given.show(study, recipe.name)


@app.command()
@expanded
def migration(
    table: Annotated[
        str | None,
        typer.Argument(metavar="[TABLE]", help="The target, or a recipe [a simulated line]."),
    ] = None,
    sources: Annotated[list[Path] | None, typer.Argument(help="Files of other tables.")] = None,
    *,
    by: Annotated[
        str | None, typer.Option(help="Divide one table by this column of its schema.")
    ] = None,
    sets: Annotated[
        str, typer.Option(help="Numbers of migrated data sets, separated by commas [all].")
    ] = "",
    epsilon: shared.Epsilon = 1.0,
    h: Annotated[
        float | None, typer.Option("--h", help="As for tacit transfer; 0 for the line.")
    ] = None,
    q: Annotated[int, typer.Option("--q", help="As for tacit transfer: 1 or 2.")] = 2,
    penalty: Annotated[
        float | None, typer.Option("--lambda", help="As for tacit transfer.")
    ] = None,
    given: StudyOptions,
) -> None:
    """Error of a transfer against the number of data sets that have migrated to the target.

    Without a table, the data sets are simulated around the points of a line.

    \b
    Example:
      tacit experiment migration
      tacit experiment migration clinic.csv north.csv south.csv --schema clinic.toml --public
      tacit experiment migration survey.csv --schema survey.toml --public --by region
    """
    from tacit.experiments import line_data_sets, read_data_sets, study_migration

    counts = [shared.count(part) for part in sets.split(",") if part.strip()] or None
    name, points = "line", None
    if table is None:
        counts, h = counts or [4, 9, 14, 19, 24], 0.0 if h is None else h
        tables_found, points = line_data_sets(max(counts) + 1, seed=given.seed)
    else:
        recipe = given.recipe(table)
        name = recipe.name
        files = [path.resolve() for path in sources or ()]
        tables_found = read_data_sets(recipe.data, files, by=by, root=given.data)
    with given.terms("transfer") as terms:
        study = study_migration(
            tables_found, counts=counts, epsilon=epsilon, delta=given.delta, h=h, q=q,
            penalty=penalty, points=points, **terms,
        )  # fmt: skip
    given.show(study, name)

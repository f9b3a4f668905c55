"""`tacit recipes`: list the recipes that are part of the package."""

from typing import Annotated

import typer

from tacit.cli import _shared as shared


def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe, to edit a copy.")] = None,
    *,
    as_json: shared.AsJson = False,
) -> None:
    """List the built-in recipes, or print one as TOML with every default written out.

    \b
    Example:
      tacit recipes
      tacit recipes mnist > my-mnist.toml
    """
    from tacit.experiments import Recipe, shipped

    if name is not None:
        recipe = Recipe.read(name)
        if as_json:
            shared.print_json(recipe.to_dict())
        else:
            typer.echo(recipe.to_toml(), nl=False)
        return
    rows = []
    for one in shipped():
        recipe = Recipe.read(one)
        what = recipe.data.path or recipe.data.name
        rows.append(
            {"name": one, "method": recipe.method, "data": what, "model": recipe.model.kind}
        )
    if as_json:
        shared.print_json({"recipes": rows})
        return
    for row in rows:
        typer.echo(f"{row['name']:<16} {row['method']}, {row['model']} model of {row['data']}")

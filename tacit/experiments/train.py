"""One recipe to one run folder.

Guarantee: what the folder holds (`secret/` apart) is `facts.event` of the training records. The
whole plan is paid before its first step. A run that was killed goes on from its last checkpoint;
the steps after it, of which nothing had left the process, are made again with the same lots and the
same noise, so the bill stays the plan's.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from tacit.events import Relation
from tacit.experiments import data
from tacit.experiments.features import cache_folder, summaries_of
from tacit.experiments.recipe import Recipe
from tacit.experiments.run import LEDGER, PART, RECIPE, Facts, Metric, RunFolder
from tacit.experiments.session import OnProgress, Session
from tacit.ledger import Budget, Ledger


def train(
    recipe: Recipe,
    path: str | os.PathLike[str],
    *,
    root: str | Path | None = None,
    baseline: Sequence[Metric] | None = None,
    on_progress: OnProgress | None = None,
    cache: Path | None = None,
) -> Facts:
    """The facts of the run in folder `path`, which is started, resumed, or found finished there.

    Parameters
    ----------
    root
        Folder of the data, default `TACIT_DATA`.
    baseline
        Rows of a non-private twin that was trained before; None trains one if the recipe has it.
    cache
        Folder for features that take long; default the user's cache. It holds private values.

    Examples
    --------
    >>> import tempfile
    >>> quick = Recipe.parse("[training]\\nepochs = 1\\n[run]\\nbaseline_steps = 0")
    >>> facts = train(quick, tempfile.mkdtemp())
    >>> facts.epsilon <= 3.0
    True
    """
    folder = RunFolder(path)
    dataset = data.load(recipe.data, root)
    recipe = recipe.filled(len(dataset.x_train))
    _take(folder, recipe)
    if folder.is_finished:
        folder.close()  # in case it was killed between the facts and this
        return folder.facts()
    with _ledger(recipe, folder) as ledger:
        session = Session(recipe, folder, dataset, ledger, cache or cache_folder())
        session.go(on_progress or (lambda _: None))
        if baseline is None or not recipe.data.holds_public_records:
            baseline = session.baseline()  # none where the records are private
        return session.finish(baseline)


def _take(folder: RunFolder, recipe: Recipe) -> None:
    """Make the folder this recipe's, or raise if it is another's."""
    text = recipe.to_toml()
    path = folder / RECIPE
    if path.is_file():
        if path.read_text(encoding="utf-8") != text:
            raise ValueError(
                f"{folder.path} holds a run of another recipe. Choose another folder with --out, "
                f"or resume it as it was planned: tacit train {path}"
            )
        return
    if folder.path.exists() and any(p.suffix != PART for p in folder.path.iterdir()):
        raise ValueError(f"{folder.path} is not empty and holds no run. Choose another with --out.")
    folder.write(RECIPE, text)


def _ledger(recipe: Recipe, folder: RunFolder) -> Ledger:
    """The data set's own ledger if the recipe names one, else one in the folder.

    With paid features the plan is two entries, both fixed in advance: the noise is calibrated to
    their sum before either is paid, and a budget would price the second as if it were adaptive.
    """
    privacy = recipe.privacy
    if privacy.ledger:
        return Ledger(privacy.ledger, relation=Relation(privacy.relation))
    assert privacy.delta is not None  # filled
    budget = Budget(privacy.epsilon, privacy.delta)
    is_over = recipe.training.shrink > 1  # and meant to be: the bill says by how much
    is_paid_twice = bool(summaries_of(recipe.features, 1))
    return Ledger(
        folder / LEDGER,
        budget=None if is_paid_twice or is_over else budget,
        relation=Relation(privacy.relation),
        unit=privacy.unit,
    )

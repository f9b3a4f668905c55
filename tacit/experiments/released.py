"""The released model as a file: its weights, the summaries of its features, and its recipe."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import nn

from tacit.datasets import Dataset
from tacit.experiments import models
from tacit.experiments.facts import MODEL
from tacit.experiments.features import Prepared, prepare
from tacit.experiments.folder import RunFolder
from tacit.experiments.recipe import Recipe

_ABOUT, _SUMMARY = "tacit", "features."


class Released:
    """A trained model with its feature transforms: takes raw records and returns class scores."""

    def __init__(self, recipe: Recipe, model: nn.Module, summaries: dict[str, np.ndarray]) -> None:
        self.recipe = recipe
        self.model = model
        self.summaries = summaries
        """Released values that the features were computed with, by name."""

    def predict(self, records: np.ndarray) -> np.ndarray:
        """Return the class of each raw record, which is an image or an encoded table row."""
        return self.scores(records).argmax(axis=1)

    def scores(self, records: np.ndarray) -> np.ndarray:
        """Return the class scores (logits) of raw records, shape (records, classes)."""
        none = np.zeros(0, np.int64)
        labels = np.zeros(len(records), np.int64)
        prepared = self.prepare(Dataset("", records[:0], none, records, labels, None))
        with torch.no_grad():
            return self.model(torch.from_numpy(prepared.x_test)).numpy()

    def prepare(self, dataset: Dataset, *, cache: Path | None = None) -> Prepared:
        """Transform the records of `dataset` as this model's features do, without any release."""
        return prepare(
            dataset,
            self.recipe.features,
            release=lambda name, *_: self.summaries[name],
            cache=cache,
        )


def model_bytes(
    recipe: Recipe, model: nn.Module, prepared: Prepared, n_classes: int | None
) -> bytes:
    """Return the content of the safetensors file of a model; equal models give equal bytes."""
    tensors = {name: t.detach().contiguous() for name, t in model.state_dict().items()}
    for name, summary in prepared.summaries.items():
        tensors[_SUMMARY + name] = torch.from_numpy(np.ascontiguousarray(summary))
    about = {
        "recipe": recipe.to_toml(),
        "shape": list(prepared.shape),
        "n_classes": n_classes,
    }
    # One metadata entry only: safetensors writes several in any order, and the file's hash must be
    # reproducible.
    return save(tensors, {_ABOUT: json.dumps(about)})


def load_model(run: str | Path) -> Released:
    """Load the released model from a run folder or from a model file."""
    path = Path(run) if Path(run).is_file() else RunFolder(run) / MODEL
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()[_ABOUT])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
    recipe = Recipe.parse(about["recipe"])
    summaries = {
        name.removeprefix(_SUMMARY): tensors.pop(name).numpy()
        for name in list(tensors)
        if name.startswith(_SUMMARY)
    }
    model = models.build(recipe.model, tuple(about["shape"]), about["n_classes"], seed=0)
    model.load_state_dict(tensors)
    return Released(recipe, model.eval(), summaries)

"""The released model as a file: weights, the linear map of the features, and how to rebuild it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tacit.experiments import models
from tacit.experiments.features import Prepared, prepare
from tacit.experiments.recipe import Recipe
from tacit.experiments.run import MODEL, RunFolder

if TYPE_CHECKING:
    from torch import nn

_ABOUT, _SUMMARY = "tacit", "features."


class Released:
    """A trained model with the features in front of it: raw records in, class scores out."""

    def __init__(
        self, recipe: Recipe, model: "nn.Module", summaries: dict[str, np.ndarray]
    ) -> None:
        self.recipe, self.model, self._summaries = recipe, model, summaries

    def predict(self, records: np.ndarray) -> np.ndarray:
        """The class of each record, given as the data set gives them (images, encoded rows)."""
        return self.scores(records).argmax(axis=1)

    def scores(self, records: np.ndarray) -> np.ndarray:
        """Logits (records, classes)."""
        import torch

        from tacit.datasets import Dataset

        none = np.zeros(0, np.int64)
        labels = np.zeros(len(records), np.int64)
        dataset = Dataset("", records[:0], none, records, labels, None)
        prepared = prepare(
            dataset, self.recipe.features, release=lambda name, *_: self._summaries[name]
        )
        with torch.no_grad():
            return self.model(torch.from_numpy(prepared.x_test)).numpy()


def model_bytes(recipe: Recipe, model: "nn.Module", prepared: Prepared, n_classes: int) -> bytes:
    """The safetensors file of a model: equal models give equal bytes."""
    import torch
    from safetensors.torch import save

    tensors = {name: t.detach().contiguous() for name, t in model.state_dict().items()}
    for name, summary in prepared.summaries.items():
        tensors[_SUMMARY + name] = torch.from_numpy(np.ascontiguousarray(summary))
    about = {
        "recipe": recipe.to_toml(),
        "shape": list(prepared.x_train.shape[1:]),
        "n_classes": n_classes,
    }
    # One entry: the format writes several in any order, and the file's hash is part of the claim.
    return save(tensors, {_ABOUT: json.dumps(about)})


def load_model(run: str | Path) -> Released:
    """The model of a run folder, ready to use; `run` may also be the model file itself."""
    from safetensors import safe_open

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

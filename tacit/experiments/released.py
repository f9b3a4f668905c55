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

_DIRECTIONS = "features.directions"


class Released:
    """A trained model with the features in front of it: raw records in, class scores out."""

    def __init__(self, recipe: Recipe, model: "nn.Module", directions: np.ndarray | None) -> None:
        self.recipe, self.model, self._directions = recipe, model, directions

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
        prepared = prepare(dataset, self.recipe.features, directions=self._given)
        with torch.no_grad():
            return self.model(torch.from_numpy(prepared.x_test)).numpy()

    def _given(self, _: np.ndarray) -> np.ndarray:
        assert self._directions is not None  # saved with every model that needs them
        return self._directions


def model_bytes(recipe: Recipe, model: "nn.Module", prepared: Prepared, n_classes: int) -> bytes:
    """The safetensors file of a model: equal models give equal bytes."""
    import torch
    from safetensors.torch import save

    tensors = {name: t.detach().contiguous() for name, t in model.state_dict().items()}
    if prepared.directions is not None:
        tensors[_DIRECTIONS] = torch.from_numpy(np.ascontiguousarray(prepared.directions))
    shape = list(prepared.x_train.shape[1:])
    return save(
        tensors,
        {"recipe": recipe.to_toml(), "shape": json.dumps(shape), "n_classes": str(n_classes)},
    )


def load_model(run: str | Path) -> Released:
    """The model of a run folder, ready to use; `run` may also be the model file itself."""
    from safetensors import safe_open

    path = Path(run) if Path(run).is_file() else RunFolder(run) / MODEL
    with safe_open(path, "pt") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
    recipe = Recipe.parse(header["recipe"])
    directions = tensors.pop(_DIRECTIONS, None)
    shape = tuple(json.loads(header["shape"]))
    model = models.build(recipe.model, shape, int(header["n_classes"]), seed=0)
    model.load_state_dict(tensors)
    return Released(recipe, model.eval(), None if directions is None else directions.numpy())

"""The released model as a file: its weights, the summaries of its features, and its recipe."""

import json
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from tacit._untrusted import parse_json, time_limit
from tacit.datasets import Dataset
from tacit.experiments import models
from tacit.experiments.facts import MODEL
from tacit.experiments.features import Prepared, prepare, summaries_of
from tacit.experiments.folder import RunFolder
from tacit.experiments.layer_table import is_listed
from tacit.experiments.recipe import Recipe

_ABOUT, _SUMMARY = "tacit", "features."
_MOST_HEADER = 16 * 2**20  # bytes
_MOST_SIZE = 2**31
_SECONDS = 600.0  # to read a model file of any honest size


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
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
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


def load_model(run: str | Path, *, trust_code: Collection[str] = ()) -> Released:
    """Load the released model from a run folder or from a model file, without running its code.

    The file may name a model of tacit or layers of torch.nn (`tacit.experiments.layer_table`).
    Another class is imported only if `trust_code` names its module. A file that is not a model of
    tacit raises `ValueError`.
    """
    path = Path(run) if Path(run).is_file() else RunFolder(run) / MODEL
    with time_limit(_SECONDS, what=f"reading {path.name}"):
        about, tensors = _read(path)
        recipe = Recipe.parse(about["recipe"], trust_code=trust_code)
        summaries = {
            name.removeprefix(_SUMMARY): tensors.pop(name).numpy()
            for name in list(tensors)
            if name.startswith(_SUMMARY)
        }
        if set(summaries) != set(summaries_of(recipe.features, 1)):
            raise ValueError(f"{path.name} does not hold the summaries that its features need.")
        return Released(recipe, _with_weights(recipe, about, tensors).eval(), summaries)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:  # Any: JSON values
    """Return the header of a model file, checked, and its tensors."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
    if size > _MOST_HEADER:
        raise ValueError(f"{path.name} has a header of more than {_MOST_HEADER:,} bytes.")
    try:
        with safe_open(path, "pt") as file:
            header = (file.metadata() or {}).get(_ABOUT)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as wrong:
        raise ValueError(f"{path.name} is not a safetensors file: {wrong}.") from None
    if header is None:
        raise ValueError(f"{path.name} is not a model of tacit: its header names no recipe.")
    about = parse_json(header, name=f"the header of {path.name}")
    match about:
        case {"recipe": str(), "shape": [*sizes], "n_classes": int(n_classes)} if (
            0 < n_classes <= _MOST_SIZE
            and 0 < len(sizes) <= 8
            and all(type(size) is int and 0 < size <= _MOST_SIZE for size in sizes)
        ):
            return about, tensors
    raise ValueError(f"the header of {path.name} is not that of a model of tacit.")


def _with_weights(
    recipe: Recipe, about: dict[str, Any], tensors: dict[str, Tensor]
) -> nn.Module:  # Any: JSON values
    """Return the model of the header with the weights of the file.

    Models of tacit and of the table are made without memory first (on torch's meta device), so that
    a header cannot ask for more memory than the file itself has weights.
    """
    is_user_code = recipe.model.kind == "module" and not is_listed(recipe.model.module)
    place = nullcontext() if is_user_code else torch.device("meta")
    try:
        with place:
            model = models.build(recipe.model, tuple(about["shape"]), about["n_classes"], seed=0)
        expected = {n: (t.shape, t.dtype) for n, t in model.state_dict().items()}
        if expected != {n: (t.shape, t.dtype) for n, t in tensors.items()}:
            raise ValueError("the weights in the file are not those of the model in its header.")
        model.load_state_dict(tensors, assign=not is_user_code)
    except (RuntimeError, TypeError, OverflowError) as wrong:
        raise ValueError(f"the model in the file cannot be made: {wrong}.") from None
    return model

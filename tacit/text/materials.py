"""What a fine-tuning run is made of: settings that agree, files, token sequences, model and loss.

Everything here is read or refused before there is a run folder, but for the hashes of the public
files, which a run that goes on compares with those it began with.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tacit._untrusted import read_json
from tacit.datasets import Dataset
from tacit.experiments import INPUTS, Recipe, RunFolder, file_hash, folder_hash, require_device
from tacit.text.exposure import Canary, make_canaries
from tacit.text.language_model import SequenceLoss, build_model, evaluating
from tacit.text.text_records import Packing, load_records, public_lines
from tacit.text.token_sequences import TokenSequences
from tacit.text.tokenizer import read_tokenizer, train_tokenizer
from tacit.training import Speed


@dataclass(frozen=True)
class Materials:
    """What a run is made of: recipe, tokenizer, token sequences and canaries. Texts are private."""

    recipe: Recipe
    root: Path
    tokenizer: Any  # Any: a tokenizer of transformers
    packing: Packing
    dataset: Dataset
    canaries: tuple[Canary, ...]

    @property
    def is_causal(self) -> bool:
        """Whether the model learns to write, rather than to classify."""
        return self.recipe.finetune.task == "causal"

    def model(self, seed: int) -> nn.Module:
        """Return the model before training, on the recipe's device."""
        model = build_model(
            self.recipe.language_model,
            self.recipe.finetune,
            self.tokenizer,
            root=self.root,
            classes=self.recipe.text.classes,
            seed=seed,
        )
        return model.to(require_device(self.recipe))

    def records(self) -> dict[str, Any]:  # Any: options of `make_private`
        """Return the private texts as `make_private` takes them.

        On a CPU, sequences are padded to one of a few lengths. On a GPU steps are compiled, for one
        shape; and a person's sequences need one.
        """
        ids, targets = self.training_tensors()
        speed = Speed(max_microbatch=self.recipe.finetune.max_microbatch)
        if ids.is_cuda or self.dataset.persons is not None:
            return {"dataset": (ids, targets), "speed": speed}
        sequences = TokenSequences(ids, targets, self.tokenizer.pad_token_id)
        return {"dataset": sequences, "collate_fn": sequences.pad_to, "speed": speed}

    def training_tensors(self) -> tuple[Tensor, Tensor]:
        """Return the token ids and targets of the private texts on the recipe's device."""
        device = require_device(self.recipe)
        ids, targets = (torch.from_numpy(t) for t in (self.dataset.x_train, self.dataset.y_train))
        return ids.to(device), targets.to(device)

    def loss(self, model: nn.Module) -> SequenceLoss:
        """Return the loss of sequences, once it is known how the model takes padding."""
        loss = SequenceLoss(
            is_causal=self.is_causal,
            per=self.recipe.finetune.loss,
            pad=self.tokenizer.pad_token_id,
            length=self.recipe.text.length,
            bf16=self.recipe.language_model.bf16,
        )
        with evaluating(model):
            loss.probe(model, len(self.tokenizer), self.recipe.text.length)
        return loss

    def public_batch(self) -> tuple[Tensor, Tensor]:
        """Return sequences of random tokens with targets, to check the model with."""
        length, generator = self.recipe.text.length, torch.Generator().manual_seed(1)
        device = require_device(self.recipe)
        ids = torch.randint(0, len(self.tokenizer), (16, length), generator=generator)
        if self.is_causal:
            return ids.to(device), ids.to(device)
        classes = self.dataset.n_classes or 1
        targets = torch.randint(0, classes, (len(ids),), generator=generator)
        return ids.to(device), targets.to(device)


def read_materials(recipe: Recipe, root: Path) -> Materials:
    """Return what a run is made of; raise for settings and files that cannot be trained on."""
    model, text = recipe.language_model, recipe.text
    is_causal = recipe.finetune.task == "causal"
    _require_settings(recipe)
    _require_other_files(recipe, root)
    if model.tokenizer_text:
        lines = public_lines(root / model.tokenizer_text)
        tokenizer = train_tokenizer(lines, size=model.tokenizer_size)
    else:
        tokenizer = read_tokenizer(root / (model.tokenizer or model.path))
    packing = Packing(tokenizer, text, is_causal)
    asked = recipe.canaries
    canaries = tuple(
        make_canaries(asked.count, digits=asked.digits, references=asked.references, seed=0)
    )
    _require_room(canaries, packing)
    planted = [canary.text for canary in canaries for _ in range(asked.repeats)]
    dataset = load_records(text, packing, root=root, canaries=planted)
    return Materials(recipe, root, tokenizer, packing, dataset, canaries)


def keep_inputs(folder: RunFolder, materials: Materials) -> None:
    """Write hashes of the public files of a new run; raise if those of an interrupted one changed.

    A checkpoint holds all weights. So a run that goes on with another base model would end with an
    adapter that fits neither.
    """
    found = dict(_inputs(materials))
    path = folder / INPUTS
    if not path.is_file():
        folder.write(INPUTS, json.dumps(found, indent=2) + "\n")
        return
    stored = read_json(path)
    changed = sorted(n for n in found.keys() | stored.keys() if found.get(n) != stored.get(n))
    if changed:
        raise ValueError(
            f"{', '.join(changed)} changed since the run in {folder.path} was begun. Restore what "
            "was there, or start anew with --out."
        )


def _inputs(materials: Materials) -> Iterator[tuple[str, str]]:
    """Yield the settings that name public files, each with a hash of these files."""
    model, text, root = materials.recipe.language_model, materials.recipe.text, materials.root
    places = {
        "language_model.path": model.path,
        "language_model.tokenizer": "" if model.tokenizer_text else model.tokenizer,
        "language_model.tokenizer_text": model.tokenizer_text,
        "text.public_test": text.public_test,
    }
    for name, place in places.items():
        if place:
            path = root / place
            yield name, file_hash(path) if path.is_file() else folder_hash(path)


def _require_settings(recipe: Recipe) -> None:
    """Raise for settings that contradict each other, before any file is read."""
    model, text = recipe.language_model, recipe.text
    is_causal = recipe.finetune.task == "causal"
    if not text.path:
        raise ValueError("text.path must name the file of the private texts.")
    if not is_causal and len(set(text.classes)) < 2:
        raise ValueError('classification needs text.classes, as in classes = ["0", "1"].')
    if len(set(text.classes)) < len(text.classes):
        raise ValueError("text.classes has a class twice.")
    if is_causal and text.classes:
        raise ValueError("text.classes is for task classification.")
    if not is_causal and text.prompt:
        raise ValueError("text.prompt is for task causal: a classifier learns from the text alone.")
    if text.sequences_per_person > 1 and not text.person:
        raise ValueError("text.sequences_per_person above 1 needs text.person.")
    if recipe.canaries.count and not is_causal:
        raise ValueError("canaries are for task causal: a classifier writes no text.")
    if text.public_test and text.evaluation == "paid":
        raise ValueError("text.evaluation paid and text.public_test exclude each other.")
    if not (model.tokenizer_text or model.tokenizer or model.path):
        raise ValueError("language_model needs tokenizer or tokenizer_text.")
    if recipe.finetune.train == "lora" and not model.path:
        raise ValueError(
            "finetune.train lora needs language_model.path: nobody could load an adapter of random "
            "weights, which no file holds."
        )
    if recipe.privacy.unit not in ("record", "person" if text.person else "record"):
        raise ValueError(
            f"privacy.unit is {recipe.privacy.unit}, and the unit of these texts is a "
            f"{'person' if text.person else 'record'}, as text.person says."
        )


def _require_other_files(recipe: Recipe, root: Path) -> None:
    """Raise if the private texts are named as public ones."""
    private = root / recipe.text.path
    for name, place in (
        ("language_model.tokenizer_text", recipe.language_model.tokenizer_text),
        ("text.public_test", recipe.text.public_test),
    ):
        public = root / place
        if place and (
            public.resolve() == private.resolve()
            or (public.exists() and private.exists() and public.samefile(private))
        ):
            raise ValueError(f"{name} must be public text, and names the private texts.")


def _require_room(canaries: Sequence[Canary], packing: Packing) -> None:
    """Raise if canaries are longer than a sequence: then their secrets would be cut off."""
    every = (len(packing.encode(text)) for c in canaries for text in (c.text, *c.references))
    need = max(every, default=0) + len(packing.start) + 1
    if canaries and need > packing.settings.length:
        raise ValueError(
            f"canaries take {need} tokens, and text.length is {packing.settings.length}: raise it, "
            "or lower canaries.digits."
        )

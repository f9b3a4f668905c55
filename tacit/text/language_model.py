"""Language models of transformers: building, losses of single sequences, writing, and saving.

Nothing is downloaded and no code of a model folder is run. Dropout is switched off: DP-SGD's noise
regularizes more than dropout does, and every step can be repeated exactly.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tacit.text.text_records import IGNORED
from tacit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tacit.experiments import FinetuneSettings, LanguageModelSettings, Recipe

_CHUNK = 256  # sequences evaluated at a time
_CLOSE = 1e-4  # padding may change an output by this share of what other tokens change

Files = dict[str, bytes]
"""Content of files by name."""


def build_model(
    settings: "LanguageModelSettings",
    finetune: "FinetuneSettings",
    tokenizer: Tokenizer,
    *,
    root: Path,
    n_classes: int | None,
    seed: int,
) -> "nn.Module":
    """Return the model with its weights to train: all of them, or those of LoRA.

    `seed` draws the weights that no file gives: a new last layer, LoRA's, or all of them.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _base(settings, finetune.task, tokenizer, root, n_classes)
        if finetune.train == "lora":
            model = _with_lora(model, finetune)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if settings.checkpointing:
        model.gradient_checkpointing_enable(  # type: ignore[operator]  # of transformers
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    return model.train()  # checkpointing is active in this mode only


def _base(
    settings: "LanguageModelSettings",
    task: str,
    tokenizer: Tokenizer,
    root: Path,
    n_classes: int | None,
) -> Any:  # Any: a model of transformers, whose classes have no common type with generate
    import torch
    from transformers import (  # pyright: ignore[reportMissingImports]  # of the extra `text`
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )

    is_causal = task == "causal"
    kind = AutoModelForCausalLM if is_causal else AutoModelForSequenceClassification
    if bool(settings.path) == bool(settings.config):
        raise ValueError("language_model needs either path, a folder, or config, a table.")
    folder = root / settings.path
    if settings.path:
        if not (folder / "config.json").is_file():
            raise ValueError(f"language_model.path: there is no model in {folder}.")
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    else:
        given = dict(settings.config)
        if not isinstance(given.get("model_type"), str):
            raise ValueError('language_model.config needs model_type, such as "gpt2" or "llama".')
        given.setdefault("vocab_size", len(tokenizer))
        for name in ("bos_token_id", "eos_token_id"):
            given.setdefault(name, getattr(tokenizer, name))
        config = AutoConfig.for_model(**given)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    config.use_cache = False
    config.pad_token_id = tokenizer.pad_token_id
    if not is_causal:
        config.num_labels = n_classes
    if settings.path:
        model = kind.from_pretrained(
            str(folder),
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
        )
    else:
        model = kind.from_config(config)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise ValueError(
            f"the tokenizer has {len(tokenizer):,} tokens, and the model "
            f"{model.get_input_embeddings().num_embeddings:,}: take the tokenizer of the model."
        )
    return model


def _with_lora(model: Any, settings: "FinetuneSettings") -> Any:  # Any: as above
    from peft import (  # pyright: ignore[reportMissingImports]  # of the extra `text`
        LoraConfig,
        TaskType,
        get_peft_model,
    )

    is_causal = settings.task == "causal"
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM if is_causal else TaskType.SEQ_CLS,
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]  # peft takes any number
        lora_dropout=0.0,
        target_modules=list(settings.lora_targets) or "all-linear",
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
    )
    return get_peft_model(model, config)


class SequenceLoss:
    """The loss of each sequence: a function of that sequence alone, as `make_private` asks for.

    Sequences are padded on the right, and padding must not matter. A decoder never looks ahead, so
    it needs no mask. Other models get a mask of their padding, row by row. Which of the two holds
    is measured on public tokens (`probe`).
    """

    def __init__(
        self,
        *,
        is_causal: bool,
        per: str,
        pad: int,
        length: int,
        bf16: bool = False,
    ) -> None:
        self.is_causal, self.per, self.pad, self.bf16 = is_causal, per, pad, bf16
        self.length = length  # public: the most tokens of a sequence
        self.has_mask = False

    def probe(self, model: "nn.Module", n_tokens: int, length: int) -> None:
        """Find out whether the model needs a mask of the padding; raise if padding matters anyway.

        Uses tokens that are drawn at random, and no record. Padding may change hidden states and
        logits by little of what other tokens change.
        """
        import torch

        generator = torch.Generator().manual_seed(0)
        short = max(1, length // 2)
        ids = torch.randint(0, n_tokens, (8, length), generator=generator)
        ids[ids == self.pad] = (self.pad + 1) % n_tokens
        ids = ids.to(next(model.parameters()).device)
        padded = ids.clone()
        padded[:, short:] = self.pad
        for has_mask in (False,) if self.is_causal else (False, True):
            self.has_mask = has_mask
            with torch.no_grad():
                alone, beside = self._states(model, ids[:, :short]), self._states(model, padded)
            pairs = zip(alone, beside, strict=True)
            if all(_is_close(one, other[:, :short]) for one, other in pairs):
                return
        raise ValueError(
            "the model's output depends on padding, also under a mask of the padding: use a model "
            "of another architecture."
        )

    def _states(self, model: Any, ids: "Tensor") -> tuple["Tensor", "Tensor"]:
        """Return the last hidden states and the logits, each of shape (sequences, tokens, ...)."""
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
        given = {"input_ids": ids, "attention_mask": self._mask(ids)}  # without autocast
        hidden, logits = inner.base_model(**given).last_hidden_state, model(**given).logits
        return hidden, logits if self.is_causal else logits[:, None]

    def _mask(self, ids: "Tensor") -> "Tensor":
        import torch

        if not self.has_mask:
            return torch.ones_like(ids)
        # One row for each sequence: nothing looks at the others.
        return (ids != self.pad)[:, None, None, :].expand(-1, 1, ids.shape[1], -1)

    def logits(self, model: "nn.Module", ids: "Tensor") -> "Tensor":
        """Return the logits of each sequence in float32."""
        import torch

        with torch.autocast(ids.device.type, torch.bfloat16) if self.bf16 else nullcontext():
            found = model(input_ids=ids, attention_mask=self._mask(ids)).logits
        return found.float()

    def token_losses(self, model: "nn.Module", batch: tuple["Tensor", "Tensor"]) -> "Tensor":
        """Return the loss of each token after the first; 0 for tokens without a target."""
        from torch.nn.functional import cross_entropy

        ids, targets = batch
        logits, targets = self.logits(model, ids)[:, :-1], targets[:, 1:]
        losses = cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
        )
        return losses.view(targets.shape)

    def __call__(self, model: "nn.Module", batch: tuple["Tensor", "Tensor"]) -> "Tensor":
        """Return one loss for each sequence of the batch."""
        from torch.nn.functional import cross_entropy

        ids, targets = batch
        if not self.is_causal:
            return cross_entropy(self.logits(model, ids), targets, reduction="none")
        total = self.token_losses(model, batch).sum(1)
        if self.per == "token":
            return total / self.length
        return total / (targets[:, 1:] != IGNORED).sum(1).clamp(min=1)


class Scores(NamedTuple):
    """What a model makes of sequences: one row for each. Private, if the sequences are."""

    losses: np.ndarray  # mean loss of the tokens of each sequence
    tokens: np.ndarray  # number of tokens with a target
    logits: np.ndarray  # (sequences, classes); no columns for a causal model


def score(model: "nn.Module", loss: SequenceLoss, ids: np.ndarray, targets: np.ndarray) -> Scores:
    """Return the loss of every sequence, and for classification the logits."""
    import torch

    device = next(model.parameters()).device
    losses, tokens, logits = [], [], []
    with torch.no_grad():
        for start in range(0, len(ids), _CHUNK):
            part = torch.from_numpy(ids[start : start + _CHUNK]).to(device)
            target = torch.from_numpy(targets[start : start + _CHUNK]).to(device)
            if loss.is_causal:
                counted = (target[:, 1:] != IGNORED).sum(1)
                total = loss.token_losses(model, (part, target)).double().sum(1)
                losses.append(total / counted.clamp(min=1))
                tokens.append(counted)
                logits.append(total.new_zeros(len(part), 0))
            else:
                found = loss.logits(model, part).double()
                losses.append(torch.nn.functional.cross_entropy(found, target, reduction="none"))
                tokens.append(torch.ones_like(target))
                logits.append(found)
    return Scores(*(torch.cat(parts).cpu().numpy() for parts in (losses, tokens, logits)))


def perplexity(scores: Scores) -> float:
    """Return exp of the mean loss per token, capped where exp overflows."""
    mean = float((scores.losses * scores.tokens).sum() / max(1, scores.tokens.sum()))
    return math.exp(min(mean, 700.0))


def write_text(
    next_logits: Callable[["Tensor"], "Tensor"],
    start: list[int],
    *,
    end: int,
    tokens: int,
    temperature: float,
    top: float,
    length: int,
    seed: int,
) -> list[int]:
    """Return the tokens that a model writes after `start`, by `next_logits` of the tokens so far.

    A token is drawn among those with at least `top` times the highest probability. The model sees
    at most the last `length` tokens.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids = list(start)
    for _ in range(tokens):
        with torch.no_grad():
            logits = next_logits(torch.tensor([ids[-length:]]))[0, -1].cpu().double()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            chances = (logits / temperature).softmax(0)
            chances[chances < top * chances.max()] = 0.0
            token = int(torch.multinomial(chances, 1, generator=generator))
        if token == end:
            break
        ids.append(token)
    return ids[len(start) :]


@contextmanager
def evaluating(model: "nn.Module") -> Iterator["nn.Module"]:
    """Switch the model to evaluation in the block, and back after it."""
    was_training = model.training
    try:
        yield model.eval()
    finally:
        model.train(was_training)


def saved_files(
    model: Any, tokenizer: Tokenizer, recipe: "Recipe"
) -> Files:  # Any: a model of transformers or peft
    """Return the files that `save_pretrained` writes, with the recipe in the header of the weights.

    A model of LoRA gives its adapter alone (`peft.PeftModel.from_pretrained` loads it onto the
    model of `language_model.path`); other models are loaded by `AutoModel...from_pretrained`.
    """
    with TemporaryDirectory() as folder, _no_progress_bar():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        found = {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir()) if p.is_file()}
    for name in found:
        if name.endswith(".safetensors"):
            found[name] = _with_recipe(found[name], recipe)
    found.pop("README.md", None)  # a form to fill in, which names no fact of this run
    return found


def _with_recipe(content: bytes, recipe: "Recipe") -> bytes:
    """Return a safetensors file with the recipe in its header; equal models give equal bytes.

    (The library writes several entries of metadata in any order.)
    """
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    about = json.dumps({"recipe": recipe.to_toml()})
    header["__metadata__"] = {"format": "pt", "tacit": about}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def _is_close(alone: "Tensor", beside: "Tensor") -> bool:
    """Return whether two outputs differ by far less than those of different sequences."""
    differences = (alone[1:] - alone[:-1]).abs().max()
    return bool((alone - beside).abs().max() <= _CLOSE * differences + 1e-6 * alone.abs().max())


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing progress bars in the block."""
    from transformers.utils import logging  # pyright: ignore[reportMissingImports]  # as above

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()

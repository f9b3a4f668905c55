"""Language models of transformers: building, losses of single sequences, writing, and saving.

Nothing is downloaded and no code of a model folder is run: weights are safetensors, never pickles,
and a configuration that names code of its own or kernels to fetch is refused. Dropout is switched
off: DP-SGD's noise regularizes more than dropout does, and every step can be repeated exactly.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tacit._untrusted import read_text
from tacit.text.text_records import IGNORED
from tacit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tacit.experiments import FinetuneSettings, LanguageModelSettings, Recipe

_CHUNK = 256  # sequences evaluated at a time, or fewer:
_MOST_LOGITS = 2**25  # at a time
_ATTENTION = (None, "eager", "sdpa")  # other names may be code to fetch
_LONGEST = 300  # characters of a reason that another library gives
_CLOSE = 1e-4  # padding may change an output by this share of what other tokens change

Files = dict[str, bytes]
"""Content of files by name."""


def build_model(
    settings: "LanguageModelSettings",
    finetune: "FinetuneSettings",
    tokenizer: Tokenizer,
    *,
    root: Path,
    classes: Sequence[str],
    seed: int,
) -> "nn.Module":
    """Return the model with its weights to train: all of them, or those of LoRA.

    `seed` draws the weights that no file gives: a new last layer, LoRA's, or all of them. A new
    layer is trained in full also with LoRA, so that the adapter's file holds it.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, new = _base(settings, finetune.task, tokenizer, root, classes)
        if finetune.train == "lora":
            model = _with_lora(model, finetune, new)
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
    classes: Sequence[str],
) -> tuple[Any, list[str]]:  # Any: a model of transformers; they have no common type with generate
    """Return the model before training, and the names of the layers whose weights are new."""
    if bool(settings.path) == bool(settings.config):
        raise ValueError("language_model needs either path, a folder, or config, a table.")
    folder = root / settings.path
    config = _config(settings, tokenizer, folder)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    config.use_cache = False
    config.pad_token_id = tokenizer.pad_token_id
    if task != "causal":
        config.num_labels = len(classes)
        config.id2label = dict(enumerate(classes))
        config.label2id = {name: number for number, name in enumerate(classes)}
    model, missing = _loaded(settings, config, task, folder)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise ValueError(
            f"the tokenizer has {len(tokenizer):,} tokens, and the model "
            f"{model.get_input_embeddings().num_embeddings:,}: take the tokenizer of the model."
        )
    return model, sorted({name.rpartition(".")[0] for name in missing})


def _config(
    settings: "LanguageModelSettings", tokenizer: Tokenizer, folder: Path
) -> Any:  # Any: a configuration of transformers
    """Return the configuration of a model; raise if it names code, or no model that we know."""
    from transformers import AutoConfig  # pyright: ignore[reportMissingImports]  # of `text`

    if settings.path:
        where, file = "language_model.path", folder / "config.json"
        if not file.is_file():
            raise ValueError(f"{where}: there is no model in {folder}.")
        try:
            given = json.loads(read_text(file))  # some hold Infinity, which is not strict JSON
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            raise ValueError(f"{where}: config.json of {folder} is no configuration.")
    else:
        where, given = "language_model.config", dict(settings.config)
        if not isinstance(given.get("model_type"), str):
            raise ValueError('language_model.config needs model_type, such as "gpt2" or "llama".')
        given.setdefault("vocab_size", len(tokenizer))
        for name in ("bos_token_id", "eos_token_id"):
            given.setdefault(name, getattr(tokenizer, name))
    _refuse_code(given, where)
    with _explained(f"{where} is no configuration that transformers knows"):
        if settings.path:
            config = AutoConfig.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        else:
            config = AutoConfig.for_model(**given)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{where}: a model of type {config.model_type} has an encoder and a decoder, which are "
            "not supported. Use a decoder, or for classification an encoder."
        )
    return config


def _refuse_code(given: Mapping[str, Any], where: str) -> None:  # Any: JSON values
    """Raise if a configuration names code to run, kernels to fetch, or weights in another form."""
    if given.get("auto_map"):
        raise ValueError(
            f"{where} names code of its own (auto_map), which is never run. Use a model whose code "
            "is part of transformers, and remove auto_map if yours is."
        )
    for name in ("attn_implementation", "_attn_implementation"):
        if given.get(name) not in _ATTENTION:
            raise ValueError(f'{where}: {name} must be "eager" or "sdpa".')
    if given.get("quantization_config"):
        raise ValueError(f"{where}: quantized weights cannot be trained. Use the model in floats.")


def _loaded(
    settings: "LanguageModelSettings", config: Any, task: str, folder: Path
) -> tuple[Any, set[str]]:  # Any: as above
    """Return the model, and the names of the weights that its folder does not hold."""
    import torch
    from transformers import (  # pyright: ignore[reportMissingImports]  # of the extra `text`
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )

    is_causal = task == "causal"
    kind = AutoModelForCausalLM if is_causal else AutoModelForSequenceClassification
    known = MODEL_FOR_CAUSAL_LM_MAPPING if is_causal else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if type(config) not in known:
        raise ValueError(f"transformers has no model of type {config.model_type} for task {task}.")
    if not settings.path:
        with _explained("language_model.config gives no model"):
            return kind.from_config(config), set()
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"language_model.path: {folder} holds an adapter. Merge it into its model first "
            "(merge_and_unload of peft)."
        )
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"language_model.path: {folder} has no weights as .safetensors. Other files of weights "
            "are pickles, which can run code: load them where you trust them, and save_pretrained."
        )
    loading: Any = kind.from_pretrained  # Any: with loading info it returns a pair
    with _explained(f"language_model.path: {folder} cannot be loaded"), _quiet():
        model, found = loading(
            str(folder),
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    missing = set(found["missing_keys"])
    inner = {name for name in missing if name.startswith(f"{model.base_model_prefix}.")}
    pooler = {name for name in inner if ".pooler." in name}  # new in classifiers of some encoders
    if lost := (missing if is_causal else inner - pooler):
        raise ValueError(
            f"language_model.path: {folder} lacks {len(lost)} of the model's weights, such as "
            f"{min(lost)}: is it a model of another kind, or a part of one?"
        )
    return model, missing


def _with_lora(model: Any, settings: "FinetuneSettings", new: list[str]) -> Any:  # Any: as above
    from peft import (  # pyright: ignore[reportMissingImports]  # of the extra `text`
        LoraConfig,
        TaskType,
        get_peft_model,
    )

    is_causal = settings.task == "causal"
    # peft trains layers in full whose names end with these, and what is inside them.
    heads = () if is_causal else ("classifier", "score")
    is_head = {n: any(p.endswith(heads) for p in n.split(".")) for n, _ in model.named_modules()}
    full = {*new, *(name for name, is_one in is_head.items() if is_one)}
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM if is_causal else TaskType.SEQ_CLS,
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]  # peft takes any number
        lora_dropout=0.0,
        target_modules=list(settings.lora_targets) or "all-linear",
        modules_to_save=[name for name in new if not is_head[name]] or None,
        exclude_modules=sorted(full) or None,
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
    )
    with _explained("finetune.lora_targets do not fit the model"):
        return get_peft_model(model, config)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Raise a `ValueError` that says what failed in the block, and why: any error may come."""
    try:
        yield
    except Exception as wrong:
        reason = " ".join(str(wrong).split())[:_LONGEST]
        raise ValueError(f"{what}: {reason}") from None


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
        self.has_mask, self._is_flat = False, False

    def probe(self, model: "nn.Module", n_tokens: int, length: int) -> None:
        """Find out whether the model needs a mask of the padding; raise if padding matters anyway.

        Uses tokens that are drawn at random, and no record. Padding may change hidden states and
        logits by little of what other tokens change.
        """
        import torch

        _require_positions(model, length)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, n_tokens, (8, length), generator=generator)
        ids[ids == self.pad] = (self.pad + 1) % n_tokens
        ids = ids.to(next(model.parameters()).device)
        masks = [(False, False), (True, False), (True, True)]
        for mask in masks[:1] if self.is_causal else masks:
            self.has_mask, self._is_flat = mask
            try:
                # Two tokens beside many: some models change with the length of the longest text.
                if all(self._ignores_padding(model, ids, max(1, n)) for n in (length // 2, 2)):
                    return
            except (RuntimeError, ValueError, TypeError):  # it takes no mask of this shape
                if not self.has_mask or self._is_flat:
                    raise
        if self.is_causal:
            raise ValueError(
                "the model's output for a token depends on later tokens, or on how many there are, "
                "so it cannot learn to write. Use a decoder, or task classification."
            )
        raise ValueError(
            "the model's output depends on padding, also under a mask of the padding: use a model "
            "of another architecture."
        )

    def _ignores_padding(self, model: Any, ids: "Tensor", short: int) -> bool:
        """Return whether sequences of `short` tokens give the same with padding and without."""
        import torch

        padded = ids.clone()
        padded[:, short:] = self.pad
        with torch.no_grad():
            alone, beside = self._states(model, ids[:, :short]), self._states(model, padded)
        pairs = zip(alone, beside, strict=True)
        return all(_is_close(one, other[:, :short]) for one, other in pairs)

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
        if self._is_flat:  # for models such as DeBERTa, which take no other mask
            return (ids != self.pad).long()
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

    config: Any = model.config  # Any: of transformers
    if not len(ids):
        columns = 0 if loss.is_causal else config.num_labels
        return Scores(np.zeros(0), np.zeros(0, np.int64), np.zeros((0, columns)))
    device = next(model.parameters()).device
    losses, tokens, logits = [], [], []
    width: int = getattr(config, "vocab_size", 1) if loss.is_causal else 1
    chunk = max(1, min(_CHUNK, _MOST_LOGITS // (ids.shape[1] * width)))
    with torch.no_grad():
        for start in range(0, len(ids), chunk):
            part = torch.from_numpy(ids[start : start + chunk]).to(device)
            target = torch.from_numpy(targets[start : start + chunk]).to(device)
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
        if logits.isnan().any() or logits.max().isinf():
            break  # a model that has diverged writes nothing
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
    with TemporaryDirectory() as folder, _quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        found = {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir()) if p.is_file()}
    for name in found:
        if name.endswith(".safetensors"):
            found[name] = _with_recipe(found[name], recipe)
    found.pop("README.md", None)  # a form to fill in, which names no fact of this run
    return found


def read_back(
    files: Files,
    settings: "LanguageModelSettings",
    finetune: "FinetuneSettings",
    tokenizer: Tokenizer,
    *,
    root: Path,
    classes: Sequence[str],
) -> "nn.Module":
    """Return the model of `saved_files` as others load it: an adapter onto the folder's model.

    Layers that the model before training lacks get fresh random weights before the adapter is
    loaded, so that one which the files do not hold shows.
    """
    import torch
    from transformers import (  # pyright: ignore[reportMissingImports]  # of the extra `text`
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )

    with TemporaryDirectory() as folder, _quiet(), torch.random.fork_rng(devices=[]):
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
        if finetune.train == "lora":
            from peft import PeftModel  # pyright: ignore[reportMissingImports]  # likewise

            torch.seed()
            base, _ = _base(settings, finetune.task, tokenizer, root, classes)
            return PeftModel.from_pretrained(base, folder, **options)
        is_causal = finetune.task == "causal"
        kind = AutoModelForCausalLM if is_causal else AutoModelForSequenceClassification
        return kind.from_pretrained(folder, dtype=torch.float32, **options)


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
def _quiet() -> Iterator[None]:
    """Keep transformers from drawing progress bars and from printing reports in the block."""
    from transformers.utils import logging  # pyright: ignore[reportMissingImports]  # as above

    was_on, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if was_on:
            logging.enable_progress_bar()


def _require_positions(model: "nn.Module", length: int) -> None:
    """Raise if the model has fewer positions than `length`."""
    from torch import nn

    most = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        return
    for name, module in model.named_modules():  # RoBERTa counts from its padding token on
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            most -= 0 if module.padding_idx is None else module.padding_idx + 1
    if length > most:
        raise ValueError(f"text.length is {length}, and the model has {most} positions.")

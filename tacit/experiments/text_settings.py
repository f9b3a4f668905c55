"""Sections of a recipe that fine-tunes a language model (`method = "finetune"`)."""

from dataclasses import dataclass, field
from functools import partial

from tacit._check import in_open_unit, non_negative, positive, whole
from tacit.experiments.settings import (
    RecipeSection,
    Value,
    at_least_one,
    below_one,
    choice,
    number_of_bands,
    setting,
)


@dataclass(frozen=True, kw_only=True)
class TextSettings(RecipeSection, section="text"):
    """Section [text]: the private texts, and what the model is measured on."""

    path: str = ""
    """File of the private texts: .csv, .tsv, .jsonl or .txt (one text a line), also with .gz, or a
    folder that `datasets` saved; relative to --data or TACIT_DATA."""
    text: str = "text"
    """Name of the column with the text."""
    prompt: str = ""
    """Column with what comes before the text and is not learned: its tokens have no loss."""
    label: str = "label"
    """Column with the class, for classification."""
    classes: tuple[str, ...] = ()
    """Declared classes, as they are written in the label column. Public."""
    person: str = ""
    """Column that says whose text it is. The unit of privacy is then a person."""
    length: int = setting(64, partial(whole, least=2))
    """Tokens of a sequence: longer texts are cut, shorter ones are padded."""
    sequences_per_person: int = setting(1, at_least_one)
    """Most sequences of a person. The texts of a person are packed into them, never with the texts
    of another person; what does not fit is left out."""
    is_public: bool = False
    """Whether the texts are public, so that a twin may be trained on them without privacy."""
    public_test: str = ""
    """File of texts that are declared public, to measure the model exactly."""
    evaluation: str = choice("none", "paid")
    """"paid": hold texts out and release the model's score on them with noise."""
    test_share: float = setting(0.1, in_open_unit)
    """Share of the records or persons that a paid evaluation holds out."""
    evaluation_share: float = setting(0.1, in_open_unit)
    """Share of epsilon that the paid evaluation spends."""
    loss_upper: float = setting(10.0, positive)
    """Largest loss of a text that a paid evaluation of perplexity counts."""
    split_seed: int = 0


@dataclass(frozen=True, kw_only=True)
class LanguageModelSettings(RecipeSection, section="language_model"):
    """Section [language_model]: model and tokenizer before fine-tuning, which are public."""

    path: str = ""
    """Folder of the pretrained model (`save_pretrained`); nothing is downloaded."""
    config: dict[str, Value] = field(default_factory=dict)
    """In place of a folder: `model_type` and other settings of a configuration of transformers. The
    weights are then random."""
    tokenizer: str = ""
    """Folder of the tokenizer; default that of the model."""
    tokenizer_text: str = ""
    """Public text file on which a tokenizer is trained. Never the private texts."""
    tokenizer_size: int = setting(4096, partial(whole, least=260))
    checkpointing: bool = False
    """Gradient checkpointing: compute activations again in the backward pass, to save memory."""
    bf16: bool = False
    """Compute in bfloat16 under autocast; weights, norms, sums and noise stay in float32."""


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(RecipeSection, section="finetune"):
    """Section [finetune]: what is trained, and how. The planner fills in what is not given."""

    task: str = choice("causal", "classification")
    train: str = choice("full", "lora")
    """All weights, or low-rank corrections (Hu et al. 2021, arXiv:2106.09685)."""
    lora_rank: int = setting(8, at_least_one)
    lora_alpha: float = setting(16.0, positive)
    lora_targets: tuple[str, ...] = ()
    """Names of the layers that get a correction; default all linear ones."""
    loss: str = choice("sequence", "token")
    """Loss of one sequence: the mean over its tokens, so that sequences count alike, or the sum
    over its tokens divided by `text.length`, so that tokens count alike."""
    epochs: float = setting(3.0, positive)
    """Passes over the records: the computing time that you grant."""
    batch_size: int | None = setting(None, at_least_one)
    """Expected records of a lot; default chosen by the planner."""
    clip_norm: float = setting(0.1, positive)
    learning_rate: float | None = setting(None, positive)
    """Of Adam, falling linearly to 0; default 1e-3 for all weights and 2e-3 for LoRA."""
    check_after: int = setting(2, at_least_one)
    """Number of steps after which it is checked that every trained weight has moved and is used."""
    bands: int | str | None = setting(None, number_of_bands)
    """Steps over which noise is correlated: a number, or "auto" for the one with the least noise of
    running sums that 4 GiB have room for. Default 1, independent noise. With more, the mean weights
    of the last quarter of the steps are released. See docs/correlated-noise.md."""
    max_microbatch: int | None = setting(None, at_least_one)


@dataclass(frozen=True, kw_only=True)
class CanarySettings(RecipeSection, section="canaries"):
    """Section [canaries]: made-up secrets, added to the texts to see if they are learned."""

    count: int = setting(0, whole)
    repeats: int = setting(1, at_least_one)
    """How often each of them is added."""
    digits: int = setting(6, at_least_one)
    """Digits of a secret."""
    references: int = setting(1000, at_least_one)
    """Secrets of the same form that were not added, with which each one is compared."""


@dataclass(frozen=True, kw_only=True)
class SampleSettings(RecipeSection, section="samples"):
    """Section [samples]: texts that the trained model writes."""

    count: int = setting(4, whole)
    """How many for each prompt; 0 for none."""
    prompts: tuple[str, ...] = ()
    """Public prompts; without one, the model begins by itself."""
    tokens: int = setting(40, at_least_one)
    temperature: float = setting(0.8, non_negative)
    """0 always takes the most probable token."""
    top: float = setting(0.05, below_one)
    """Tokens with less than this share of the highest probability are not drawn."""

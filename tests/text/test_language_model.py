"""Model folders are data, kinds of models are taken or refused, and files hold all weights."""

import json
import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'tacit-dp[text]'")
pytest.importorskip("peft", reason="needs peft: pip install 'tacit-dp[text]'")

import transformers

from tacit.experiments import FinetuneSettings, LanguageModelSettings
from tacit.text import train_tokenizer
from tacit.text.language_model import (
    SequenceLoss,
    build_model,
    evaluating,
    read_back,
    saved_files,
    score,
    write_text,
)
from tacit.text.tokenizer import read_tokenizer

pytestmark = pytest.mark.filterwarnings("default")  # of transformers and peft
LENGTH = 8
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 2, "max_position_embeddings": 16}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 1, "head_dim": 8}
DECODERS = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
    "llama": GROUPED,
    "mistral": GROUPED | {"sliding_window": 4},
    "qwen2": GROUPED | {"tie_word_embeddings": True},
    "qwen3": GROUPED,
    "gemma": GROUPED,
    "gemma3_text": GROUPED | {"sliding_window": 4},
    "gpt_neox": SMALL,
}
ENCODERS = {
    "bert": SMALL,
    "roberta": SMALL | {"max_position_embeddings": 20},
    "distilbert": {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2,
                   "max_position_embeddings": 16},
    "deberta-v2": SMALL | {"relative_attention": True, "position_buckets": 4,
                           "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
    "electra": SMALL | {"embedding_size": 16},
}  # fmt: skip
WORDS = ["the staff was kind and the room was quiet again " * 3] * 20


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(WORDS, size=300)


@pytest.fixture(scope="module")
def wordpiece():
    """A tokenizer as BERT's: no token for the end but the separator."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(WORDS[0].split()))]
    letters = [chr(i) for i in range(97, 123)]
    every = [*words, *letters, *(f"##{letter}" for letter in letters)]
    return transformers.BertTokenizerFast(vocab={word: i for i, word in enumerate(every)})


@pytest.fixture(scope="module")
def folder_of(tokenizer, wordpiece, tmp_path_factory):
    """Return the folder of a small random model of a type, with a tokenizer."""
    root = tmp_path_factory.mktemp("models")

    def made(kind):
        folder = root / kind
        if folder.is_dir():
            return folder
        own = wordpiece if kind in ENCODERS and kind != "roberta" else tokenizer
        settings = (DECODERS | ENCODERS)[kind] | {"vocab_size": len(own)}
        settings |= {f"{n}_token_id": getattr(own, f"{n}_token_id") for n in ("pad", "bos", "eos")}
        config = transformers.AutoConfig.for_model(kind, **settings)
        auto = transformers.AutoModel if kind in ENCODERS else transformers.AutoModelForCausalLM
        with torch.random.fork_rng():
            torch.manual_seed(0)
            auto.from_config(config).save_pretrained(folder)
        own.save_pretrained(folder)
        return folder

    return made


def built(folder, *, train="full", task="classification", seed=0, **options):
    tokenizer = read_tokenizer(folder)
    settings = LanguageModelSettings(path=str(folder))
    finetune = FinetuneSettings(task=task, train=train, **options)
    classes = ("no", "yes") if task == "classification" else ()
    model = build_model(settings, finetune, tokenizer, root=folder, classes=classes, seed=seed)
    own = {"pad": tokenizer.pad_token_id, "length": LENGTH}
    loss = SequenceLoss(is_causal=task == "causal", per="sequence", **own)
    with evaluating(model):
        loss.probe(model, len(tokenizer), LENGTH)
    return model, loss, tokenizer


def public(tokenizer, rows=4):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(5, len(tokenizer), (rows, LENGTH), generator=generator)


KINDS = [("causal", kind) for kind in DECODERS]
KINDS += [("classification", kind) for kind in (DECODERS | ENCODERS)]


RUNS = [("lora", "classification", "deberta-v2"), ("full", "causal", "qwen2")]
RUNS += [("lora", "classification", "distilbert"), ("lora", "causal", "gpt2")]
EVERY_RUN = [
    (train, *kind) if (train, *kind) in RUNS else pytest.param(train, *kind, marks=pytest.mark.slow)
    for train in ("full", "lora")
    for kind in KINDS
]


@pytest.mark.parametrize(("train", "task", "kind"), EVERY_RUN)
def test_files_hold_every_trained_weight_of_every_kind(folder_of, task, kind, train):
    """Also new layers, which the folder of the base model lacks, and tied embeddings."""
    folder = folder_of(kind)
    model, loss, tokenizer = built(folder, train=train, task=task)
    with torch.no_grad():
        for number, p in enumerate(p for p in model.parameters() if p.requires_grad):
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number)))
    recipe = _Recipe()
    files = saved_files(model, tokenizer, recipe)
    classes = ("no", "yes") if task == "classification" else ()
    loaded = read_back(
        files,
        LanguageModelSettings(path=str(folder)),
        FinetuneSettings(task=task, train=train),
        tokenizer,
        root=folder,
        classes=classes,
    )
    ids = public(tokenizer)
    with torch.no_grad(), evaluating(model), evaluating(loaded):
        trained, found = loss.logits(model, ids), loss.logits(loaded, ids)
        base = loss.logits(built(folder, train=train, task=task)[0].eval(), ids)
    torch.testing.assert_close(found, trained, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(base, trained, atol=1e-3)


class _Recipe:
    def to_toml(self):
        return "method = 'finetune'"


@pytest.mark.parametrize(("task", "kind"), KINDS)
def test_no_sequence_sees_another_or_its_own_padding(folder_of, task, kind):
    model, loss, tokenizer = built(folder_of(kind), task=task)
    ids = public(tokenizer)
    ids[0, 5:] = tokenizer.pad_token_id
    other = ids.clone()
    other[1:] = public(tokenizer, 7)[4:]
    with torch.no_grad(), evaluating(model):
        alone, beside = loss.logits(model, ids[:1]), loss.logits(model, ids)[:1]
        among_others = loss.logits(model, other)[:1]
        short = loss.logits(model, ids[:1, :5])
    torch.testing.assert_close(beside, among_others, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(alone, beside, rtol=1e-4, atol=1e-5)
    seen = alone[:, :5] if task == "causal" else alone
    torch.testing.assert_close(short, seen, rtol=1e-4, atol=1e-5)


def test_a_released_classifier_names_the_declared_classes(folder_of):
    model, _, _ = built(folder_of("gpt2"))
    assert model.config.id2label == {0: "no", 1: "yes"}


@pytest.mark.parametrize(
    ("kind", "task", "message"),
    [
        ("t5", "classification", "has an encoder and a decoder"),
        ("t5", "causal", "has an encoder and a decoder"),
        ("bart", "causal", "has an encoder and a decoder"),
        ("distilbert", "causal", "has no model of type distilbert for task causal"),
        ("vit", "classification", "has no model of type vit for task classification"),
        ("nothing", "causal", "is no configuration that transformers knows"),
    ],
)
def test_other_kinds_of_models_are_refused_in_one_sentence(
    tokenizer, tmp_path, kind, task, message
):
    settings = LanguageModelSettings(config={"model_type": kind})
    finetune = FinetuneSettings(task=task)
    with pytest.raises(ValueError, match=message) as refusal:
        build_model(settings, finetune, tokenizer, root=tmp_path, classes=("0", "1"), seed=0)
    assert len(str(refusal.value)) < 500


def test_an_encoder_cannot_learn_to_write(tokenizer, tmp_path):
    config = SMALL | {"model_type": "bert"}
    settings, finetune = LanguageModelSettings(config=config), FinetuneSettings(task="causal")
    model = build_model(settings, finetune, tokenizer, root=tmp_path, classes=(), seed=0)
    loss = SequenceLoss(is_causal=True, per="token", pad=tokenizer.pad_token_id, length=LENGTH)
    with pytest.raises(ValueError, match="depends on later tokens"):
        loss.probe(model, len(tokenizer), LENGTH)


def test_a_model_that_changes_with_the_longest_text_is_refused(tokenizer, tmp_path):
    """A long text would change what the model makes of the short ones beside it."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 3, **factors}
    config = GROUPED | {"model_type": "llama", "rope_parameters": scaling | {"rope_theta": 1e4}}
    settings, finetune = LanguageModelSettings(config=config), FinetuneSettings(task="causal")
    model = build_model(settings, finetune, tokenizer, root=tmp_path, classes=(), seed=0)
    loss = SequenceLoss(is_causal=True, per="token", pad=tokenizer.pad_token_id, length=LENGTH)
    with pytest.raises(ValueError, match="the model's output"):
        loss.probe(model, len(tokenizer), LENGTH)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "roberta", "distilbert", "gpt_neox"])
def test_a_length_above_the_positions_is_refused(folder_of, kind):
    model, loss, tokenizer = built(folder_of(kind))
    loss.probe(model, len(tokenizer), 16)
    with pytest.raises(ValueError, match=r"text.length is 25, and the model has 1\d positions"):
        loss.probe(model, len(tokenizer), 25)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"auto_map": {"AutoConfig": "own.Config"}}, "names code of its own"),
        ({"attn_implementation": "kernels-community/flash"}, 'must be "eager" or "sdpa"'),
        ({"_attn_implementation": "someone/else"}, 'must be "eager" or "sdpa"'),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized weights"),
        ({"model_type": "own"}, "is no configuration that transformers knows"),
        ({"n_layer": 3}, "lacks 12 of the model's weights"),
        ({"n_embd": 8}, "cannot be loaded"),
        ({"n_embd": "wide"}, "is no configuration|cannot be loaded|can be read"),
    ],
)
def test_a_model_folder_that_names_code_or_lacks_weights_is_refused(
    folder_of, tmp_path, settings, message
):
    folder = shutil.copytree(folder_of("gpt2"), tmp_path / "model")
    (folder / "own.py").write_text("raise SystemExit('ran')")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    with pytest.raises(ValueError, match=message):
        built(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 5000, "\0"])
def test_a_broken_configuration_is_refused(folder_of, tmp_path, content):
    folder = shutil.copytree(folder_of("gpt2"), tmp_path / "model")
    tokenizer = read_tokenizer(folder)
    (folder / "config.json").write_text(content)
    settings = LanguageModelSettings(path=str(folder))
    with pytest.raises(ValueError, match=r"language_model.path"):
        build_model(settings, FinetuneSettings(), tokenizer, root=tmp_path, classes=(), seed=0)


class Ran:
    """A pickle of it raises when it is loaded."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle was loaded')",))


@pytest.mark.parametrize("beside", [False, True])
def test_weights_in_pickles_are_never_loaded(folder_of, tmp_path, beside):
    folder = shutil.copytree(folder_of("gpt2"), tmp_path / "model")
    torch.save({"x": Ran()}, folder / "pytorch_model.bin")
    if beside:
        built(folder)
        return
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no weights as .safetensors"):
        built(folder)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x08" + b"\0" * 7 + b"notjson!"])
def test_broken_weights_are_refused(folder_of, tmp_path, content):
    folder = shutil.copytree(folder_of("gpt2"), tmp_path / "model")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="cannot be loaded"):
        built(folder)


def test_an_adapter_is_no_model(folder_of, tmp_path):
    folder = shutil.copytree(folder_of("gpt2"), tmp_path / "model")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/else"}')
    with pytest.raises(ValueError, match="holds an adapter"):
        built(folder)


@pytest.mark.parametrize(
    "targets", [("nothing",), ("ln_1",), ("wte",), ("c_attn", "c_fc")], ids=lambda t: t[0]
)
def test_layers_for_an_adapter_are_named_or_refused(folder_of, targets):
    if targets in (("nothing",), ("ln_1",)):
        with pytest.raises(ValueError, match=r"finetune.lora_targets do not fit the model"):
            built(folder_of("gpt2"), train="lora", task="causal", lora_targets=targets)
        return
    model, _, _ = built(folder_of("gpt2"), train="lora", task="causal", lora_targets=targets)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all("lora_" in name and any(t in name for t in targets) for name in names)


def test_a_folder_without_a_vocabulary_is_no_tokenizer(folder_of, tmp_path):
    folder = shutil.copytree(folder_of("gpt2"), tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ValueError, match=r"language_model.tokenizer"):
        read_tokenizer(folder)
    with pytest.raises(ValueError, match=r"language_model.tokenizer"):
        read_tokenizer(tmp_path / "nowhere")


def test_the_separator_ends_texts_where_no_other_token_does(folder_of):
    found = read_tokenizer(folder_of("bert"))
    assert found.eos_token == "[SEP]"
    assert found.pad_token == "[PAD]"


@pytest.mark.parametrize("task", ["causal", "classification"])
def test_no_sequences_have_no_scores(folder_of, task):
    """A coin for each record may hold none of them out."""
    model, loss, _ = built(folder_of("gpt2"), task=task)
    shape = (0, LENGTH) if task == "causal" else (0,)
    found = score(model, loss, np.zeros((0, LENGTH), np.int64), np.zeros(shape, np.int64))
    assert (len(found.losses), len(found.tokens)) == (0, 0)
    assert found.logits.shape == (0, 0 if task == "causal" else 2)


def test_scores_do_not_depend_on_how_many_sequences_fit_at_once(folder_of, monkeypatch):
    model, loss, tokenizer = built(folder_of("gpt2"), task="causal")
    ids = public(tokenizer, 6).numpy()
    whole = score(model, loss, ids, ids)
    monkeypatch.setattr("tacit.text.language_model._MOST_LOGITS", 1)
    np.testing.assert_allclose(score(model, loss, ids, ids).losses, whole.losses, rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_model_that_has_diverged_writes_nothing(value):
    def logits(ids):
        return torch.full((1, ids.shape[1], 4), value)

    options = {"end": 0, "tokens": 3, "top": 0.1, "length": 4, "seed": 0}
    assert write_text(logits, [1], temperature=0.8, **options) == []

"""A recipe becomes a run folder that transformers and peft load; it resumes, and checks itself."""

import json
import os
import random

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'tacit[text]'")
pytest.importorskip("peft", reason="needs peft: pip install 'tacit[text]'")
os.environ["HF_HUB_OFFLINE"] = "1"

from tacit.errors import WeakGuarantee
from tacit.experiments import Recipe, RunFolder
from tacit.mechanisms import optimal_bands
from tacit.report import verify_run, write_page
from tacit.text import UntrainedWeights, finetune, finetune_run
from tacit.text.finetune_run import _materials

pytestmark = pytest.mark.filterwarnings("default")  # of transformers and peft
GOOD, BAD = ["bright", "quick", "quiet", "kind"], ["dull", "slow", "noisy", "rude"]
OTHER = ["the", "a", "was", "staff", "room", "meal", "train", "it", "very", "and", "again"]
DIGITS = "the secret number of guest is 0 1 2 3 4 5 6 7 8 9"
LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
         "num_attention_heads": 2, "tie_word_embeddings": True}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
BERT = {"model_type": "bert", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 64}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("texts"), random.Random(0)

    def rows(n):
        for i in range(n):
            words = rng.choices(OTHER, k=5) + rng.choices((BAD, GOOD)[i % 2], k=2)
            rng.shuffle(words)
            yield f"{i % 2}\t{' '.join(words)}\tp{i // 4}"

    for name, n in (("train.tsv", 240), ("test.tsv", 40)):
        (folder / name).write_text("\n".join(["label\ttext\twho", *rows(n)]))
    public = [row.split("\t")[1] for row in rows(80)] + [DIGITS] * 20
    (folder / "public.txt").write_text("\n".join(public))
    for name, config in (("llama", LLAMA), ("gpt2", GPT2)):
        made = _materials(recipe(config), folder)
        made.model(0).save_pretrained(folder / name)
        made.tokenizer.save_pretrained(folder / name)
    return folder


def recipe(config=LLAMA, *, text=None, finetune=None, model=None, **sections):
    """Return a recipe of a model with random weights; with LoRA, those that `root` has saved."""
    own = {"tokenizer_text": "public.txt", "tokenizer_size": 300, "config": config}
    if (finetune or {}).get("train") == "lora" and "path" not in (model or {}):
        own = {"path": config["model_type"]}
    given = {
        "method": "finetune",
        "text": {"path": "train.tsv", "length": 12} | (text or {}),
        "language_model": own | (model or {}),
        "finetune": {"epochs": 1, "batch_size": 60} | (finetune or {}),
        "privacy": {"epsilon": 8.0, "delta": 1e-4},
        "run": {"seed": 0, "checkpoint_seconds": 0.0},
        **sections,
    }
    return Recipe.from_dict(given)


CLASSIFY = {"task": "classification"}
CLASSES = {"classes": ["0", "1"], "public_test": "test.tsv"}


def test_a_language_model_with_canaries_and_a_twin(root, tmp_path):
    chosen = recipe(
        text={"public_test": "test.tsv", "is_public": True, "length": 48},
        canaries={"count": 2, "references": 20, "repeats": 2},
        samples={"count": 1, "prompts": ["the staff"], "tokens": 5},
    )
    facts = finetune(chosen, tmp_path, root=root)
    assert facts.epsilon <= 8.0
    assert facts.n_records == 244  # canaries count as records
    assert facts.utility.metric == "perplexity"
    assert facts.utility.non_private
    page = write_page(tmp_path).read_text()
    assert not verify_run(tmp_path)
    assert "mean exposure" in page
    assert "the staff" in page
    found = json.loads((tmp_path / "exposure.json").read_text())
    assert set(found["models"]) == {"private", "without privacy"}
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight.data_ptr() == loaded.get_input_embeddings().weight.data_ptr()
    (tmp_path / "exposure.json").write_text("{}")
    assert verify_run(tmp_path)  # its hash is part of the facts


def test_an_adapter_is_loaded_by_peft_and_gives_the_same_scores(root, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    base = _materials(recipe(text=CLASSES, finetune=CLASSIFY), root)
    base.model(0).save_pretrained(tmp_path / "base")
    base.tokenizer.save_pretrained(tmp_path / "base")
    model = {"config": {}, "tokenizer_text": "", "path": str(tmp_path / "base")}
    settings = {"task": "classification", "train": "lora", "learning_rate": 0.01}
    chosen = recipe(text=CLASSES, model=model, finetune=settings)
    facts = finetune(chosen, tmp_path / "run", root=root)
    assert facts.model_file == "adapter_model.safetensors"
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    plain.config.pad_token_id = AutoTokenizer.from_pretrained(tmp_path / "base").pad_token_id
    adapted = PeftModel.from_pretrained(plain, tmp_path / "run").eval()
    found = _materials(chosen, root).dataset
    with torch.no_grad():
        logits = adapted(input_ids=torch.from_numpy(found.x_test)).logits
    right = float((logits.argmax(1).numpy() == found.y_test).mean())
    assert right == pytest.approx(facts.utility.mean)


class Killed(Exception):
    pass


def test_a_killed_run_goes_on_to_the_same_weights(root, tmp_path):
    def kill(progress):
        if progress.step == 2:
            raise Killed

    chosen = recipe(GPT2, text=CLASSES, finetune=CLASSIFY)
    with pytest.raises(Killed):
        finetune(chosen, tmp_path / "a", root=root, on_progress=kill)
    resumed = finetune(chosen, tmp_path / "a", root=root)
    whole = finetune(chosen, tmp_path / "b", root=root)
    assert (resumed.resumed, whole.resumed) == (1, 0)
    assert resumed.model_sha256 == whole.model_sha256
    assert resumed.epsilon == whole.epsilon
    assert finetune(chosen, tmp_path / "a", root=root).created == resumed.created


@pytest.mark.parametrize("train", ["full", "lora"])
def test_correlated_noise_is_chosen_billed_shown_and_resumed(root, tmp_path, train):
    def kill(progress):
        if progress.step == 9:
            raise Killed

    settings = CLASSIFY | {"batch_size": 20, "bands": "auto", "train": train}
    chosen = recipe(GPT2, text=CLASSES, finetune=settings)
    with pytest.raises(Killed):
        finetune(chosen, tmp_path / "a", root=root, on_progress=kill)
    resumed = finetune(chosen, tmp_path / "a", root=root)
    whole = finetune(chosen, tmp_path / "b", root=root)
    assert resumed.model_sha256 == whole.model_sha256
    bands = whole.hyperparameters["bands"]
    assert bands > 1
    assert whole.event["type"] == "BandedGaussian"
    assert len(whole.event["column"]) == bands
    assert whole.hyperparameters["noise_saving"] > 1
    assert whole.epsilon <= 8.0
    assert f"from one of {bands} groups" in whole.sampling_used
    assert whole.released[0].startswith("mean of the last weights")
    page = write_page(tmp_path / "b").read_text()
    assert f"noise correlated over {bands} steps by the column" in page
    assert "times less noise than independent noise" in page
    assert not verify_run(tmp_path / "b")
    same = recipe(GPT2, text=CLASSES, finetune=settings | {"bands": bands})
    assert finetune(same, tmp_path / "c", root=root).model_sha256 == whole.model_sha256


@pytest.mark.parametrize("task", ["causal", "classification"])
def test_persons_are_the_unit_and_a_paid_score_is_part_of_the_bill(root, tmp_path, task):
    text = {"person": "who", "sequences_per_person": 2, "evaluation": "paid", "test_share": 0.2}
    text |= {"classes": ["0", "1"]} if task == "classification" else {}
    chosen = recipe(text=text, finetune={"task": task, "batch_size": 16})
    facts = finetune(chosen, tmp_path, root=root)
    assert (facts.unit, facts.n_records, facts.records_per_person) == ("person", 48, 2)
    assert facts.epsilon <= 8.0
    assert any(t.what == "evaluation" and t.cost == "paid" for t in facts.touches)
    with RunFolder(tmp_path).reopen_ledger(facts) as ledger:
        assert len(ledger.history()) > 1
    write_page(tmp_path)
    assert not verify_run(tmp_path)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_nothing_crosses_from_one_sequence_to_another(root, config):
    made = _materials(recipe(config), root)
    model = made.model(0)
    loss = made.loss(model)
    ids, targets = (torch.from_numpy(a[:4]) for a in (made.dataset.x_train, made.dataset.y_train))
    with torch.no_grad():
        before = loss(model, (ids, targets))
        ids[1:] = 5
        after = loss(model, (ids, targets))
        alone = loss(model, (ids[:1], targets[:1]))
    assert torch.allclose(before[0], after[0], atol=1e-6)
    assert torch.allclose(alone[0], after[0], atol=1e-5)


def test_padding_does_not_matter_to_an_encoder(root):
    made = _materials(recipe(BERT, text=CLASSES, finetune=CLASSIFY), root)
    model = made.model(0)
    assert made.loss(model).has_mask
    decoder = _materials(recipe(text=CLASSES, finetune=CLASSIFY), root)
    assert not decoder.loss(decoder.model(0)).has_mask


def test_losses_by_sequence_and_by_token(root):
    losses = {}
    for per in ("sequence", "token"):
        made = _materials(recipe(finetune={"loss": per}), root)
        model = made.model(0)
        batch = tuple(torch.from_numpy(a[:3]) for a in (made.dataset.x_train, made.dataset.y_train))
        with torch.no_grad():
            losses[per] = made.loss(model)(model, batch).numpy()
    counted = (made.dataset.y_train[:3, 1:] >= 0).sum(1)
    np.testing.assert_allclose(losses["token"] * 12, losses["sequence"] * counted, rtol=1e-5)


@pytest.mark.parametrize("train", ["full", "lora"])
def test_bfloat16_and_checkpointing(root, tmp_path, train):
    made = recipe(model={"bf16": True, "checkpointing": True}, finetune={"train": train})
    assert finetune(made, tmp_path, root=root).epsilon <= 8.0


def test_an_adapter_that_is_not_trained_stops_the_run(root, tmp_path, monkeypatch):
    def other(model, rate, **_):
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        return torch.optim.SGD([p for n, p in named if "lora_A" not in n], lr=rate)

    monkeypatch.setattr(finetune_run, "make_optimizer", other)
    with pytest.raises((UntrainedWeights, ValueError), match="lora_A"):
        finetune(recipe(finetune={"train": "lora"}), tmp_path, root=root)


def test_an_optimizer_that_ignores_its_weights_stops_the_run(root, tmp_path, monkeypatch):
    class Idle(torch.optim.SGD):
        def step(self, closure=None):
            return None

    def idle(model, rate, **_):
        return Idle([p for p in model.parameters() if p.requires_grad], lr=rate)

    monkeypatch.setattr(finetune_run, "make_optimizer", idle)
    with pytest.raises(UntrainedWeights, match="did not move in the first steps"):
        finetune(recipe(finetune={"train": "lora"}), tmp_path, root=root)


def test_generation_that_ignores_the_adapter_stops_the_run(root, tmp_path, monkeypatch):
    def base(loop):
        def logits(ids):
            with loop.model.disable_adapter():
                return loop.loss.logits(loop.model, ids)

        return logits

    monkeypatch.setattr(finetune_run, "next_logits", base)
    with pytest.raises(UntrainedWeights, match="generation does not use the trained weights"):
        finetune(recipe(finetune={"train": "lora"}), tmp_path, root=root)


@pytest.mark.parametrize(
    "privacy", [{"epsilon": 30.0, "delta": 1e-4}, {"epsilon": 8.0, "delta": 0.1}]
)
def test_a_weak_guarantee_is_warned_of(root, tmp_path, privacy):
    with pytest.warns(WeakGuarantee):
        finetune(recipe(privacy=privacy), tmp_path, root=root)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_named_before_anything_is_paid(root, tmp_path):
    with pytest.raises(ValueError, match="needs a GPU"):
        finetune(recipe(run={"device": "cuda", "seed": 0}), tmp_path, root=root)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("train", ["full", "lora"])
def test_a_gpu_trains_scores_writes_and_resumes(root, tmp_path, train):
    made = recipe(
        text={"public_test": "test.tsv", "is_public": True, "length": 48},
        finetune={"train": train},
        canaries={"count": 2, "references": 20},
        samples={"count": 1, "tokens": 5},
        run={"device": "cuda", "seed": 0, "checkpoint_seconds": 0.0},
    )

    def stop(progress):
        if progress.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(made, tmp_path, root=root, on_progress=stop)
    facts = finetune(made, tmp_path, root=root)
    assert facts.resumed == 1
    assert facts.utility.non_private


def test_steps_do_not_depend_on_the_scale_of_gradients():
    """The clip norm sets the scale of gradients and noise alike; Adam's steps are the same."""
    moved = []
    for scale in (1.0, 1e-4):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        before = model.weight.detach().clone()
        optimizer = finetune_run.make_optimizer(model, 0.1, noise_std=scale)
        for p in model.parameters():
            p.grad = scale * torch.randn(p.shape)
        optimizer.state_noise([(p, scale) for p in model.parameters()])
        optimizer.step()
        moved.append(model.weight.detach() - before)
    assert torch.allclose(*moved, atol=1e-6)
    assert moved[0].abs().max() > 1e-2


@pytest.mark.parametrize("bands", [1, 4, 32])
def test_adam_has_the_noise_of_its_steps_as_floor(bands):
    """Correlated noise is larger in each step than independent noise of the same multiplier."""
    column = optimal_bands(200, bands)
    inverse = np.linalg.inv(sum(c * np.eye(200, k=-k) for k, c in enumerate(column)))
    of_steps = np.sqrt((inverse**2).sum(1).mean())
    assert finetune_run.step_growth(200, bands) == pytest.approx(of_steps)
    assert (of_steps > 1) == (bands > 1)


def test_wrong_settings_are_refused_before_anything_is_paid(root, tmp_path):
    wrong = [
        (recipe(text={"path": ""}), "text.path must name"),
        (recipe(finetune=CLASSIFY), "needs text.classes"),
        (recipe(text=CLASSES), "is for task classification"),
        (recipe(model={"tokenizer_text": "train.tsv"}), "must be public text"),
        (recipe(model={"config": {}}), "either path, a folder, or config"),
        (recipe(text={"public_test": "test.tsv", "evaluation": "paid"}), "exclude each other"),
        (recipe(canaries={"count": 1}, text=CLASSES, finetune=CLASSIFY), "canaries are for"),
        (recipe(model={"tokenizer_text": ""}), "needs tokenizer or tokenizer_text"),
    ]
    for number, (chosen, message) in enumerate(wrong):
        folder = tmp_path / str(number)
        with pytest.raises(ValueError, match=message):
            finetune(chosen, folder, root=root)

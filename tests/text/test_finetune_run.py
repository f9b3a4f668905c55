"""A recipe becomes a run folder that transformers and peft load; it resumes, and checks itself."""

import copy
import json
import os
import random
import shutil

import numpy as np
import pytest
import torch
from slow_cases import one_fast

pytest.importorskip("transformers", reason="needs transformers: pip install 'tacit-dp[text]'")
pytest.importorskip("peft", reason="needs peft: pip install 'tacit-dp[text]'")
os.environ["HF_HUB_OFFLINE"] = "1"

from tacit.errors import WeakGuarantee
from tacit.experiments import Recipe, RunFolder
from tacit.mechanisms import optimal_bands
from tacit.report import verify_run, write_page
from tacit.text import UntrainedWeights, finetune, finetune_run, materials
from tacit.text.materials import read_materials
from tacit.training.noise import NoisyMean

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
        made = read_materials(recipe(config), folder)
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
        "run": {"seed": 0},
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
    shown = []
    facts = finetune(chosen, tmp_path, root=root, on_progress=lambda p: shown.append(p.doing))
    told = " | ".join(shown)  # work that may take long, before the steps and after them
    for doing in ("reading the texts", "planning", "one text", "twin", "samples", "canary 2"):
        assert doing in told
    assert facts.epsilon <= 8.0
    assert facts.n_records == 244  # canaries count as records
    assert facts.utility.metric == "perplexity"
    assert facts.utility.non_private
    page = write_page(tmp_path).read_text()
    assert not verify_run(tmp_path)
    assert "mean exposure" in page
    cost = facts.utility.mean - facts.utility.non_private[0].value
    assert f"privacy costs {cost:.4f}" in page
    assert "the staff" in page
    found = json.loads((tmp_path / "exposure.json").read_text())
    assert set(found["models"]) == {"private", "without privacy"}
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight.data_ptr() == loaded.get_input_embeddings().weight.data_ptr()
    (tmp_path / "exposure.json").write_text("{}")
    assert verify_run(tmp_path)  # its hash is part of the facts


def test_an_adapter_is_loaded_by_peft_and_gives_the_same_scores(root, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a network was asked")

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    base = read_materials(recipe(text=CLASSES, finetune=CLASSIFY), root)
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
    found = read_materials(chosen, root).dataset
    with torch.no_grad():
        logits = adapted(input_ids=torch.from_numpy(found.x_test)).logits
    right = float((logits.argmax(1).numpy() == found.y_test).mean())
    assert right == pytest.approx(facts.utility.mean)


class Killed(Exception):
    pass


def test_a_killed_run_goes_on_within_its_budget(root, tmp_path, monkeypatch):
    """On a machine, too, whose sums differ in their last bits, as those of every GPU do."""
    release = NoisyMean.release_into

    def jittered(self, parameters, sums, *rest, **options):
        sums = [total * (1 + 1e-7 * torch.randn_like(total)) for total in sums]
        release(self, parameters, sums, *rest, **options)

    def kill(progress):
        if progress.step == 2:
            raise Killed

    monkeypatch.setattr(NoisyMean, "release_into", jittered)
    chosen = recipe(GPT2, text=CLASSES, finetune=CLASSIFY, run={})
    with pytest.raises(Killed):
        finetune(chosen, tmp_path / "a", root=root, on_progress=kill)
    with pytest.warns(UserWarning, match="out of the reserve"):
        resumed = finetune(chosen, tmp_path / "a", root=root)
    assert (resumed.resumed, resumed.hyperparameters["reserve"]) == (1, 1)
    assert resumed.epsilon <= resumed.epsilon_target
    assert finetune(chosen, tmp_path / "a", root=root).created == resumed.created


@pytest.mark.parametrize("train", one_fast(["full", "lora"], every=2))
def test_correlated_noise_is_chosen_billed_shown_and_resumed(root, tmp_path, train):
    def kill(progress):
        if progress.step == 9:
            raise Killed

    settings = CLASSIFY | {"batch_size": 20, "bands": "auto", "train": train}
    chosen = recipe(GPT2, text=CLASSES, finetune=settings)
    with pytest.raises(Killed):
        finetune(chosen, tmp_path / "a", root=root, on_progress=kill)
    with pytest.warns(UserWarning, match="goes on after"):
        finetune(chosen, tmp_path / "a", root=root, lost_steps="skip")
    whole = finetune(chosen, tmp_path / "b", root=root)
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
    made = read_materials(recipe(config), root)
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
    made = read_materials(recipe(BERT, text=CLASSES, finetune=CLASSIFY), root)
    model = made.model(0)
    assert made.loss(model).has_mask
    decoder = read_materials(recipe(text=CLASSES, finetune=CLASSIFY), root)
    assert not decoder.loss(decoder.model(0)).has_mask


def test_losses_by_sequence_and_by_token(root):
    losses = {}
    for per in ("sequence", "token"):
        made = read_materials(recipe(finetune={"loss": per}), root)
        model = made.model(0)
        batch = tuple(torch.from_numpy(a[:3]) for a in (made.dataset.x_train, made.dataset.y_train))
        with torch.no_grad():
            losses[per] = made.loss(model)(model, batch).numpy()
    counted = (made.dataset.y_train[:3, 1:] >= 0).sum(1)
    np.testing.assert_allclose(losses["token"] * 12, losses["sequence"] * counted, rtol=1e-5)


@pytest.mark.parametrize("train", one_fast(["lora", "full"], every=2))
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


def ignoring(monkeypatch, of, change):
    """Let generation, or evaluation, use what `change` makes of the loop from the third step on."""
    name = {"generation": "next_logits", "evaluation": "scores_of"}[of]
    own = getattr(finetune_run, name)

    def planted(loop, *given):
        if loop.private.steps_taken > 2:
            return change(loop, lambda: own(loop, *given))
        return own(loop, *given)

    monkeypatch.setattr(finetune_run, name, planted)


def disabled(loop, act):
    with loop.model.disable_adapter():
        found = act()
        if callable(found):  # generation: it is used after this block
            return lambda ids: _disabled(loop, found, ids)
        return found


def _disabled(loop, found, ids):
    with loop.model.disable_adapter():
        return found(ids)


def stale(loop, act):
    """What a copy of the model from the third step gives."""
    if not hasattr(loop, "copied"):
        loop.copied = copy.deepcopy(loop.model)
    return _with_model(loop, loop.copied, act)


def merged(loop, act):
    if not hasattr(loop, "copied"):
        loop.copied = copy.deepcopy(loop.model).merge_and_unload()
    return _with_model(loop, loop.copied, act)


def other(loop, act):
    """A new adapter of another name is active."""
    if "other" not in loop.model.peft_config:
        loop.model.add_adapter("other", loop.model.peft_config["default"])
    loop.model.set_adapter("other")
    return act()


def _with_model(loop, model, act):
    own, loop.model = loop.model, model
    try:
        found = act()
        if callable(found):
            return lambda ids: loop.loss.logits(model, ids)
        return found
    finally:
        loop.model = own


SIX_STEPS = {"train": "lora", "epochs": 1.5}
PLANTED = [disabled, stale, merged, other]


@pytest.mark.parametrize("of", ["generation", "evaluation"])
@pytest.mark.parametrize("change", one_fast(PLANTED, every=4))
def test_a_model_that_is_exchanged_after_the_first_check_stops_the_run(
    root, tmp_path, monkeypatch, of, change
):
    ignoring(monkeypatch, of, change)
    with pytest.raises(UntrainedWeights, match=r"does not use|did not move"):
        finetune(recipe(finetune=SIX_STEPS), tmp_path, root=root)
    assert not (tmp_path / "facts.json").exists()


def test_an_adapter_that_is_switched_off_for_generation_stops_the_run(root, tmp_path, monkeypatch):
    def base(loop):
        def logits(ids):
            with loop.model.disable_adapter():
                return loop.loss.logits(loop.model, ids)

        return logits

    monkeypatch.setattr(finetune_run, "next_logits", base)
    with pytest.raises(UntrainedWeights, match="generation does not use the trained weights"):
        finetune(recipe(finetune={"train": "lora"}), tmp_path, root=root)


def test_a_classifier_that_is_scored_without_its_adapter_stops_the_run(root, tmp_path, monkeypatch):
    """Its head is trained, so that its scores do change."""
    own = finetune_run.scores_of

    def without(loop, *given):
        for layer in _adapted(loop.model):
            layer._disable_adapters = True
        try:
            return own(loop, *given)
        finally:
            for layer in _adapted(loop.model):
                layer._disable_adapters = False

    monkeypatch.setattr(finetune_run, "scores_of", without)
    with pytest.raises(UntrainedWeights, match=r"evaluation does not use \d+ of \d+ trained"):
        finetune(recipe(text=CLASSES, finetune=CLASSIFY | {"train": "lora"}), tmp_path, root=root)


def _adapted(model):
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def test_an_optimizer_of_copies_stops_the_run(root, tmp_path, monkeypatch):
    own = finetune_run.make_optimizer

    def of_copies(model, rate, **options):
        return own(copy.deepcopy(model), rate, **options)

    monkeypatch.setattr(finetune_run, "make_optimizer", of_copies)
    with pytest.raises((UntrainedWeights, ValueError), match=r"optimizer|did not move"):
        finetune(recipe(finetune={"train": "lora"}), tmp_path, root=root)


def test_an_adapter_that_is_frozen_beside_a_trained_head_stops_the_run(root, tmp_path, monkeypatch):
    own = materials.build_model

    def headed(*given, **options):
        model = own(*given, **options)
        for name, p in model.named_parameters():
            p.requires_grad_("lora_" not in name and p.requires_grad)
        return model

    monkeypatch.setattr(materials, "build_model", headed)
    chosen = recipe(text=CLASSES, finetune=CLASSIFY | {"train": "lora"})
    with pytest.raises(UntrainedWeights, match="weights of adapters are frozen"):
        finetune(chosen, tmp_path, root=root)


@pytest.mark.parametrize("train", one_fast(["lora", "full"], every=2))
def test_files_with_the_weights_of_another_step_stop_the_run(root, tmp_path, monkeypatch, train):
    own = finetune_run.saved_files

    def stale_files(model, tokenizer, recipe):
        before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in before:
                    p.mul_(0.99)
        try:
            return own(model, tokenizer, recipe)
        finally:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if name in before:
                        p.copy_(before[name])

    monkeypatch.setattr(finetune_run, "saved_files", stale_files)
    with pytest.raises(UntrainedWeights, match="saved files give a model with other outputs"):
        finetune(recipe(finetune={"train": train}), tmp_path, root=root)


def test_weights_are_checked_as_steps_double_and_at_the_end():
    def checked(steps, first, resumed_at=1):
        every = range(1, steps + 1)
        return [s for s in every if finetune_run.is_checked(s, steps, first, resumed_at=resumed_at)]

    assert checked(100, 2) == [2, 4, 8, 16, 32, 100]
    assert checked(100, 3) == [3, 6, 12, 24, 48, 100]
    assert checked(3, 2) == [2, 3]
    assert checked(1, 2) == [1]
    assert checked(100, 2, resumed_at=21) == [2, 4, 8, 16, 21, 32, 100]
    assert checked(100, 2, resumed_at=99) == [2, 4, 8, 16, 32, 100]


@pytest.mark.parametrize(
    "privacy",
    one_fast([{"epsilon": 30.0, "delta": 1e-4}, {"epsilon": 8.0, "delta": 0.1}], every=2),
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
        run={"device": "cuda"},
    )

    def stop(progress):
        if progress.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(made, tmp_path, root=root, on_progress=stop)
    with pytest.warns(UserWarning, match="out of the reserve"):
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
    if not (root / "linked.tsv").exists():
        os.link(root / "train.tsv", root / "linked.tsv")
    wrong = [
        (recipe(text={"path": ""}), "text.path must name"),
        (recipe(finetune=CLASSIFY), "needs text.classes"),
        (recipe(text=CLASSES), "is for task classification"),
        (recipe(model={"tokenizer_text": "train.tsv"}), "must be public text"),
        (recipe(model={"config": {}}), "either path, a folder, or config"),
        (recipe(text={"public_test": "test.tsv", "evaluation": "paid"}), "exclude each other"),
        (recipe(canaries={"count": 1}, text=CLASSES, finetune=CLASSIFY), "canaries are for"),
        (recipe(model={"tokenizer_text": ""}), "needs tokenizer or tokenizer_text"),
        (recipe(text={"public_test": "train.tsv"}), "public_test must be public text"),
        (recipe(text={"public_test": "linked.tsv"}), "public_test must be public text"),
        (recipe(text=CLASSES | {"classes": ["0", "0", "1"]}, finetune=CLASSIFY), "a class twice"),
        (recipe(text=CLASSES | {"prompt": "who"}, finetune=CLASSIFY), "text.prompt is for task"),
        (recipe(text={"sequences_per_person": 2}), "above 1 needs text.person"),
        (recipe(privacy={"epsilon": 8.0, "unit": "person"}), "the unit of these texts is a record"),
        (recipe(privacy={"epsilon": 8.0, "unit": "visit"}, text={"person": "who"}), "is a person"),
        (recipe(canaries={"count": 1}), "canaries take 4. tokens, and text.length is 12"),
        (recipe(finetune={"train": "lora"}, model={"path": ""}), "lora needs language_model.path"),
        (recipe(finetune={"train": "lora", "lora_targets": ["no"]}), "lora_targets do not fit"),
        (recipe(GPT2, text={"length": 65}), "the model has 64 positions"),
        (recipe({"model_type": "t5"}), "has an encoder and a decoder"),
        (recipe(BERT), "depends on later tokens"),
    ]
    for number, (chosen, message) in enumerate(wrong):
        folder = tmp_path / str(number)
        with pytest.raises(ValueError, match=message):
            finetune(chosen, folder, root=root)
        assert not folder.exists()  # so that the corrected recipe may use it


@pytest.mark.parametrize("changed", one_fast(["base", "public_test"], every=2))
def test_a_run_does_not_go_on_with_other_public_files(root, tmp_path, changed):
    """Its checkpoint holds all weights, so its adapter would fit no model in the end."""

    def kill(progress):
        if progress.step == 2:
            raise Killed

    shutil.copytree(root, tmp_path / "root")
    chosen = recipe(text={"public_test": "test.tsv"}, finetune={"train": "lora"})
    with pytest.raises(Killed):
        finetune(chosen, tmp_path / "run", root=tmp_path / "root", on_progress=kill)
    if changed == "base":
        other = tmp_path / "root/llama/model.safetensors"
        content = bytearray(other.read_bytes())
        content[-1] ^= 1
        other.write_bytes(content)
        name = "language_model.path"
    else:
        with (tmp_path / "root/test.tsv").open("a") as stream:
            stream.write("\n0\tone more\tp99")
        name = "text.public_test"
    with pytest.raises(ValueError, match=f"{name} changed since the run"):
        finetune(chosen, tmp_path / "run", root=tmp_path / "root")


def test_a_diverged_run_ends_with_a_sentence(root, tmp_path):
    with pytest.raises(UntrainedWeights, match=r"diverged|learning rate that is too high"):
        finetune(recipe(finetune={"learning_rate": 1e30}), tmp_path, root=root)


@pytest.mark.parametrize("task", ["causal", "classification"])
def test_a_paid_score_of_no_text_or_of_undeclared_classes_raises_nothing(root, tmp_path, task):
    """Whether a coin holds any text out, and which classes those have, is private."""
    rows = [f"{i % 3}\tthe room was {i}" for i in range(5)]
    (tmp_path / "few.tsv").write_text("\n".join(["label\ttext", *rows]))
    (tmp_path / "public.txt").write_text((root / "public.txt").read_text())
    held = []
    for seed in range(30):
        text = {"path": "few.tsv", "evaluation": "paid", "split_seed": seed}
        text |= {"classes": ["0", "1"]} if task == "classification" else {}
        chosen = recipe(GPT2, text=text, finetune={"task": task, "batch_size": 2, "epochs": 0.5})
        held.append((len(read_materials(chosen, tmp_path).dataset.x_test), chosen))
    for n_held in (0, 1):
        chosen = next(one for n, one in held if n == n_held)
        facts = finetune(chosen, tmp_path / f"run{n_held}", root=tmp_path)
        assert facts.epsilon <= 8.0
        assert facts.n_records == 5  # less a tenth, rounded, whatever the coins say


def test_every_saved_file_is_in_the_certificate(root, tmp_path):
    chosen = recipe(finetune={"train": "lora"}, samples={"count": 0})
    facts = finetune(chosen, tmp_path, root=root)
    ours = {"recipe.toml", "run.ledger", "facts.json", "adapter_model.safetensors", "data.json"}
    found = {p.name for p in tmp_path.iterdir() if not p.name.startswith((".", "run."))}
    assert set(facts.files) == found - ours
    write_page(tmp_path)
    for name in ("adapter_config.json", "tokenizer.json", "inputs.json"):
        content = (tmp_path / name).read_text()
        (tmp_path / name).write_text(content + " ")
        assert verify_run(tmp_path), name
        (tmp_path / name).write_text(content)
    assert not verify_run(tmp_path)


PLACES = ["reading the texts", "planning", "one text", "step 1", "step 2", "step 4", "twin",
          "saving", "samples", "canary 2"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("evaluation", ["none", "paid"])
@pytest.mark.filterwarnings("ignore:the run goes on after")
def test_a_run_that_is_killed_everywhere_ends_within_its_budget(root, tmp_path, evaluation):
    is_paid = evaluation == "paid"
    text = {"evaluation": evaluation, "is_public": True, "length": 48}
    chosen = recipe(
        text=text | ({} if is_paid else {"public_test": "test.tsv"}),
        finetune={"train": "lora"},
        canaries={"count": 2, "references": 20},
        samples={"count": 1, "prompts": ["the staff"], "tokens": 3},
    )

    def kill_at(place):
        def act(progress):
            if place in (progress.doing or f"step {progress.step}"):
                raise Killed

        return act

    for place in PLACES:
        with pytest.raises(Killed):
            finetune(
                chosen, tmp_path / "a", root=root, on_progress=kill_at(place), lost_steps="skip"
            )
    resumed = finetune(chosen, tmp_path / "a", root=root, lost_steps="skip")
    whole = finetune(chosen, tmp_path / "b", root=root)
    assert resumed.epsilon == whole.epsilon <= 8.0
    assert whole.steps - 3 <= resumed.steps < whole.steps
    assert resumed.files.keys() == whole.files.keys()
    write_page(tmp_path / "a")
    assert not verify_run(tmp_path / "a")

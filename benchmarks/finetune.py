"""Private fine-tuning of a small decoder: SST-2, E2E, canaries, and the time of a step.

    python benchmarks/finetune.py DATA BASE OUT [--device cuda] [--seconds 400] [--only PIECE ...]

DATA is the folder of sst2_*.tsv.gz and e2e_*.csv.gz. BASE is the decoder that
`benchmarks/_public_text.py` has trained on public text. Results of the pieces are kept in
OUT/results.json, and read from all OUT/results*.json: a benchmark that was stopped goes on where it
was, no new piece is begun after `--seconds`, and results/finetune.md is written from what is there
(`--only nothing` does that alone).

The decoder is fine-tuned on the 67,349 sentences of SST-2, in full and by LoRA, at epsilon 3 and 8.
The share of the gap closed is (private - head) / (plain - head): `head` is a logistic regression on
the last hidden state of the pretrained decoder, and `plain` full fine-tuning without privacy.
Learning rates are chosen on sentences held out of the training set, nothing on the dev set. One
seed each.
"""

import argparse
import csv
import gzip
import json
import random
import time
from dataclasses import replace
from pathlib import Path

import _results as results
import numpy as np
import torch
from _public_text import words

from tacit.experiments import Recipe
from tacit.ledger import Ledger
from tacit.text import CHANCE, finetune
from tacit.text.finetune_run import FinetuneLoop, make_optimizer
from tacit.text.language_model import evaluating, score
from tacit.text.materials import read_materials
from tacit.text.planner import filled
from tacit.text.token_sequences import TokenSequences
from tacit.training import make_private

PACKAGES = ("tacit", "torch", "transformers", "peft")
LENGTH, EPOCHS, BATCH = 48, 10, 4096
RATES = {"full": (3e-4, 1e-3, 3e-3), "lora": (1e-3, 3e-3, 1e-2)}
SETTINGS = """Lots of 4,096 records, 10 epochs and a clip norm of 0.1 follow what is published (Li
et al. 2022). The learning rates are the best of three at epsilon 3 in 4 epochs, measured on 2,000
sentences held out of the training set: nothing was chosen on the dev set."""
RUNS = [(train, epsilon) for epsilon in (8, 3) for train in ("full", "lora")]
PLAIN_STEPS, PLAIN_RATE = 1500, 5e-4
CANARIES = 40


def prepare(data: Path, out: Path, *, most: int | None) -> None:
    """Write SST-2, its dev set, and E2E in lower case; at most `most` training records."""
    for name, part in (("sst2.tsv", "sst2_train"), ("sst2_dev.tsv", "sst2_dev")):
        with gzip.open(data / f"{part}.tsv.gz", "rt", encoding="utf-8") as stream:
            rows = [line.rstrip("\n") for line in stream][1:]
        random.Random(0).shuffle(rows)
        lines = ["label\ttext", *(rows[:most] if name == "sst2.tsv" else rows)]
        (out / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, limit in (("e2e_dev", most), ("e2e_test", 300)):
        with gzip.open(data / f"{name}.csv.gz", "rt", encoding="utf-8") as stream:
            found = [{k: v.lower() for k, v in row.items()} for row in csv.DictReader(stream)]
        random.Random(0).shuffle(found)
        lines = [json.dumps(row) for row in found[:limit]]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def sst2_recipe(
    train: str, epsilon: float, base: Path, device: str, *, rate: float | None = None
) -> Recipe:
    """Return the recipe of a run on SST-2."""
    return Recipe.from_dict(
        {
            "method": "finetune",
            "name": f"sst2-{train}",
            "text": {"path": "sst2.tsv", "public_test": "sst2_dev.tsv", "classes": ["0", "1"],
                     "length": LENGTH, "is_public": True},
            "language_model": {"path": str(base.resolve()), "bf16": has_bf16(device)},
            "finetune": {"task": "classification", "train": train, "epochs": float(EPOCHS),
                         "batch_size": BATCH, "learning_rate": rate or RATES[train][1],
                         "lora_rank": 16, "lora_alpha": 32.0,
                         "max_microbatch": 1152 if device == "cuda" else 256},
            "privacy": {"epsilon": float(epsilon), "delta": 1e-5},
            "run": {"device": device, "seed": 0, "baseline_steps": 0},
        }
    )  # fmt: skip


def has_bf16(device: str) -> bool:
    """Return whether the device multiplies in bfloat16 faster than in float32."""
    return device == "cuda" or torch.cpu._is_avx512_bf16_supported()


def plain(base: Path, out: Path, device: str) -> dict:
    """Fine-tune on SST-2 in full without privacy; return the accuracy on the dev set."""
    materials = read_materials(sst2_recipe("full", 8, base, device), out)
    model = materials.model(0)
    loss, dataset = materials.loss(model), materials.dataset
    sequences = TokenSequences(*materials.training_tensors(), materials.tokenizer.pad_token_id)
    lengths = np.array([len(ids) for ids, _ in sequences])
    optimizer = torch.optim.AdamW(model.parameters(), lr=PLAIN_RATE)
    rng, curve, step = np.random.default_rng(0), [], 0
    while step < PLAIN_STEPS:
        drawn = rng.integers(len(sequences), size=(PLAIN_STEPS // 10, len(sequences) // 512))
        drawn = drawn.reshape(-1)[lengths[drawn.reshape(-1)].argsort()].reshape(drawn.shape)
        for rows in rng.permutation(drawn):  # of like length
            for group in optimizer.param_groups:
                group["lr"] = PLAIN_RATE * (1 - step / PLAIN_STEPS)
            optimizer.zero_grad()
            ids, targets = sequences.pad_to([sequences[row] for row in rows])
            loss(model, (ids.to(device), targets.to(device))).mean().backward()
            optimizer.step()
            step += 1
        with evaluating(model):
            scores = score(model, loss, dataset.x_test, dataset.y_test)
        curve.append([step, float((scores.logits.argmax(1) == dataset.y_test).mean())])
        print("plain", *curve[-1], flush=True)
    return {"accuracy": curve[-1][1], "curve": curve}


def trials(train: str, base: Path, out: Path, device: str) -> dict:
    """Return the accuracy on held-out training sentences by learning rate, at epsilon 3."""
    lines = (out / "sst2.tsv").read_text(encoding="utf-8").splitlines()
    held = min(2000, len(lines) // 4)
    for name, part in (("sst2_part", lines[1 + held :]), ("sst2_held", lines[1 : 1 + held])):
        (out / f"{name}.tsv").write_text("\n".join([lines[0], *part]) + "\n", encoding="utf-8")
    recipe = sst2_recipe(train, 3, base, device).with_settings(
        {"text.path": "sst2_part.tsv", "text.public_test": "sst2_held.tsv", "finetune.epochs": 4.0}
    )
    materials, recipe, plan = _planned(recipe, out)
    found = {}
    for rate in RATES[train]:
        model = materials.model(0)
        loss, private, optimizer = _make_private(materials, model, plan, rate, is_checked=False)
        for lot in private:
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - private.steps_taken / private.steps)
            private.step(lot)
        with evaluating(model):
            scores = score(model, loss, materials.dataset.x_test, materials.dataset.y_test)
        right = scores.logits.argmax(1) == materials.dataset.y_test
        found[f"{rate:g}"] = float(right.mean())
        print(train, rate, found[f"{rate:g}"], flush=True)
    best = max(found, key=lambda rate: found[rate])
    return {"accuracy": found, "rate": float(best)}


def _planned(recipe: Recipe, out: Path):
    materials = read_materials(recipe, out)
    recipe, plan = filled(recipe, materials.dataset.n_records, ())
    return replace(materials, recipe=recipe), recipe, plan.chosen


def _make_private(materials, model, plan, rate: float, *, is_checked: bool = True):
    """Return the loss, the private run and the optimizer that `finetune` would use."""
    settings, loss = materials.recipe.finetune, materials.loss(model)
    std = plan.noise_multiplier * settings.clip_norm / plan.batch_size
    optimizer = make_optimizer(model, rate, noise_std=std)
    records = materials.records()
    records["speed"] = replace(records["speed"], check=is_checked)
    private = make_private(
        model, optimizer, loss_fn=loss, batch_size=plan.batch_size, steps=plan.steps, seed=0,
        clip_norm=settings.clip_norm, noise_multiplier=plan.noise_multiplier,
        n_records=materials.dataset.n_records, **records,
    )  # fmt: skip
    return loss, private, optimizer


def sst2(train: str, epsilon: float, base: Path, out: Path, device: str, *, rate: float) -> dict:
    """Fine-tune on SST-2; return the facts that count."""
    run, recipe = (
        out / f"sst2-{train}-{epsilon}",
        sst2_recipe(train, epsilon, base, device, rate=rate),
    )
    facts = finetune(recipe, run, root=out, on_progress=_shown)
    return {
        "epsilon": facts.epsilon,
        "accuracy": facts.utility.mean,
        "steps": facts.steps,
        "batch": facts.hyperparameters["batch_size"],
        "noise": facts.hyperparameters["noise_multiplier"],
        "training": facts.seconds,
        "curve": [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()],
    }


def _shown(progress) -> None:
    if progress.is_measured:
        shown = {name: round(value, 4) for name, value in progress.metric.items()}
        print(progress.step, progress.steps, shown, flush=True)


def head(base: Path, out: Path, device: str) -> dict:
    """Return the accuracy of a logistic regression on the decoder's last hidden state."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(base, dtype=torch.float32).to(device)
    tokenizer = AutoTokenizer.from_pretrained(base)

    def features(name: str) -> tuple[np.ndarray, np.ndarray]:
        lines = (out / name).read_text(encoding="utf-8").splitlines()[1:]
        labels, texts = zip(*(line.split("\t") for line in lines), strict=True)
        ids = np.full((len(texts), LENGTH), tokenizer.pad_token_id)
        last = np.zeros(len(texts), int)
        for row, body in enumerate(tokenizer(list(texts), add_special_tokens=False)["input_ids"]):
            tokens = [tokenizer.bos_token_id, *body[: LENGTH - 2], tokenizer.eos_token_id]
            ids[row, : len(tokens)], last[row] = tokens, len(tokens) - 1
        parts = []
        with torch.no_grad():
            for start in range(0, len(ids), 512):
                part = torch.from_numpy(ids[start : start + 512]).to(device)
                hidden = model(part, attention_mask=torch.ones_like(part)).last_hidden_state
                rows = torch.arange(len(hidden))
                parts.append(hidden[rows, torch.from_numpy(last[start : start + 512])].cpu())
        return torch.cat(parts).numpy(), np.array(labels)

    x, y = features("sst2.tsv")
    found = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300)).fit(x, y)
    return {"accuracy": float(found.score(*features("sst2_dev.tsv")))}


def e2e(base: Path, out: Path, device: str) -> dict:
    """Fine-tune on E2E with canaries, private and not; return perplexities, samples, exposures."""
    run = out / "e2e-8"
    recipe = Recipe.from_dict(
        {
            "method": "finetune",
            "name": "e2e",
            "text": {"path": "e2e_dev.jsonl", "public_test": "e2e_test.jsonl", "text": "ref",
                     "prompt": "mr", "length": 112, "is_public": True},
            "language_model": {"path": str(base.resolve()), "bf16": has_bf16(device)},
            "finetune": {"epochs": 12.0, "batch_size": 512, "learning_rate": 1e-3,
                         "max_microbatch": 640 if device == "cuda" else 64},
            # Each canary is one record, so epsilon 8 holds for it.
            "canaries": {"count": CANARIES, "repeats": 1, "references": 500},
            "samples": {"count": 2, "prompts": ["name[blue spice], eattype[pub], area[riverside]"]},
            "privacy": {"epsilon": 8.0, "delta": 1e-5},
            "run": {"device": device, "seed": 0, "baseline_steps": 3000, "baseline_rate": 1e-3},
        }
    )  # fmt: skip
    facts = finetune(recipe, run, root=out, on_progress=_shown)
    return {
        "epsilon": facts.epsilon,
        "perplexity": facts.utility.mean,
        "plain": facts.utility.non_private[0].value,
        "samples": json.loads((run / "samples.json").read_text())["samples"],
        "exposure": json.loads((run / "exposure.json").read_text()),
        "steps": facts.steps,
        "batch": facts.hyperparameters["batch_size"],
        "noise": facts.hyperparameters["noise_multiplier"],
        "records": facts.n_records,
        "training": facts.seconds,
    }


def canaries(data: Path, out: Path) -> dict:
    """Plant canaries once each among 800 texts of E2E, for a model of random weights, on a CPU."""
    with gzip.open(data / "e2e_dev.csv.gz", "rt", encoding="utf-8") as stream:
        rows = [row["ref"].lower() for row in csv.DictReader(stream)]
    random.Random(0).shuffle(rows)
    for name, part in (("canaries.jsonl", rows[:800]), ("canaries_test.jsonl", rows[800:900])):
        lines = [json.dumps({"text": text}) for text in part]
        (out / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    with gzip.open(data / "wikitext2_valid.txt.gz", "rt", encoding="utf-8") as stream:
        (out / "public.txt").write_text(stream.read().lower(), encoding="utf-8")
    sizes = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
        "num_attention_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    recipe = Recipe.from_dict(
        {
            "method": "finetune",
            "name": "canaries",
            "text": {"path": "canaries.jsonl", "public_test": "canaries_test.jsonl", "length": 40,
                     "is_public": True},
            "language_model": {"tokenizer_text": "public.txt", "tokenizer_size": 600,
                               "config": sizes},
            "finetune": {"epochs": 40.0, "batch_size": 210, "learning_rate": 3e-3},
            "canaries": {"count": CANARIES, "repeats": 1, "references": 200, "digits": 4},
            "samples": {"count": 1},
            "privacy": {"epsilon": 8.0, "delta": 1e-5},
            "run": {"seed": 0, "baseline_steps": 3000, "baseline_rate": 3e-3},
        }
    )  # fmt: skip
    facts = finetune(recipe, out / "canaries", root=out)
    return {
        "epsilon": facts.epsilon,
        "perplexity": facts.utility.mean,
        "plain": facts.utility.non_private[0].value,
        "exposure": json.loads((out / "canaries" / "exposure.json").read_text()),
        "steps": facts.steps,
    }


def step_time(base: Path, out: Path, device: str) -> dict:
    """Return the time of a step of `finetune` over that of `private.step` on the same model.

    The second loop calls `make_private` with the same settings on the same model, records, loss
    and optimizer, as a user would. Steps alternate, so that both see the same machine.
    """
    materials, _, plan = _planned(sst2_recipe("full", 8, base, device), out)
    plan = plan._replace(steps=60)
    ours = FinetuneLoop(
        materials, noise_multiplier=plan.noise_multiplier, steps=plan.steps, ledger=Ledger(),
        also=(), seed=0,
    )  # fmt: skip
    _, theirs, _ = _make_private(materials, materials.model(0), plan, 1e-3)
    loop, lots = ours.steps(), iter(theirs)
    runs = {"finetune": lambda: next(loop), "private.step": lambda: theirs.step(next(lots))}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(16):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            times[name].append(_seconds(runs[name], device))
    medians = {name: float(np.median(seconds[4:])) for name, seconds in times.items()}
    ratio = medians["finetune"] / medians["private.step"]
    shown = {name: [round(1e3 * t, 1) for t in seconds] for name, seconds in times.items()}
    return {"ratio": ratio, "milliseconds": {n: 1e3 * t for n, t in medians.items()}, "all": shown}


def _seconds(run, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return f"{name}; {results.environment(PACKAGES)}"


def write(found: dict, base: Path) -> None:
    """Write the results of the pieces that are there."""
    pretraining = base / "pretraining.json"
    told = words(json.loads(pretraining.read_text())) if pretraining.is_file() else "unknown"
    intro = (
        f"Decoder, pretrained on public text (`benchmarks/_public_text.py`): {told}. SST-2: "
        f"{found.get('records', 0):,} training sentences, {EPOCHS} epochs, {LENGTH} tokens, "
        "accuracy on the 872 dev sentences (standard error about 1.3 points), delta 1e-5, one seed "
        f"each. {SETTINGS}"
    )
    blocks = [intro, _sst2_table(found)]
    if "e2e" in found:
        blocks += _e2e_blocks(found["e2e"])
    blocks += _canary_blocks(found)
    if "step" in found:
        one = found["step"]["milliseconds"]
        blocks.append(
            "## Time of a step\n\nFull fine-tuning on SST-2, lots of "
            f"{BATCH:,}: {one['finetune']:.1f} ms by `finetune`, {one['private.step']:.1f} ms by "
            f"`private.step` on the same model, ratio {found['step']['ratio']:.3f} (medians of 12 "
            "steps of each, in turn)."
        )
    blocks.insert(0, f"Measured on {found.get('measured', 'nothing yet')}")
    results.write("finetune", "Private fine-tuning", PACKAGES, *blocks)


def _sst2_table(found: dict) -> str:
    header = ("trained", "epsilon", "linear head", "private", "without privacy", "gap closed",
              "plan", "seconds")  # fmt: skip
    base, rows = found.get("head", {}).get("accuracy"), []
    for train, epsilon in sorted(RUNS):
        one, top = found.get(f"sst2-{train}-{epsilon}"), found.get("plain", {}).get("accuracy")
        if one is None or top is None or base is None:
            rows.append((train, epsilon, *["not measured"] * 6))
            continue
        share = (one["accuracy"] - base) / (top - base)
        rows.append((train, f"{one['epsilon']:.3f}", f"{base:.1%}", f"{one['accuracy']:.1%}",
                     f"{top:.1%}", f"{share:.0%}",
                     f"{one['batch']:,} x {one['steps']}, noise {one['noise']:.3f}",
                     f"{one['training']:.0f}"))  # fmt: skip
    tried = [f"{train}: " + ", ".join(f"{rate} {value:.1%}" for rate, value in
             found[f"trials-{train}"]["accuracy"].items())
             for train in RATES if f"trials-{train}" in found]  # fmt: skip
    more = f"\n\nHeld-out accuracy by learning rate: {'; '.join(tried)}." if tried else ""
    return "## SST-2\n\n" + results.table(header, rows) + more


def _e2e_blocks(one: dict) -> list[str]:
    rows = [(s["prompt"], s["text"].replace("|", "/").replace("\n", " ")) for s in one["samples"]]
    return [
        f"## E2E\n\n{one['records']:,} records of the dev part and canaries, epsilon "
        f"{one['epsilon']:.2f}: perplexity of reference tokens on 300 test records "
        f"{one['perplexity']:.2f}, without privacy {one['plain']:.2f} (batch {one['batch']}, "
        f"{one['steps']} steps, noise {one['noise']:.3f}). {one.get('note', '')}".rstrip(),
        results.table(("prompt", "sample of the private model"), rows),
    ]


def _canary_rows(setting: str, one: dict) -> list[tuple]:
    found = one["exposure"]
    return [
        (setting, name, f"{v['mean']:.2f}", f"{v['error_at_chance']:.2f}", f"{max(v['bits']):.2f}",
         f"{np.log2(found['references'] + 1):.2f}", f"{v['p_value']:.2g}")
        for name, v in found["models"].items()
    ]  # fmt: skip


def _canary_blocks(found: dict) -> list[str]:
    settings = {
        "e2e": "decoder, E2E",
        "canaries": "2 layers of width 64 with random weights, 800 texts of E2E, one CPU core",
    }
    rows = [r for name, words in settings.items() if "exposure" in found.get(name, ())
            for r in _canary_rows(words, found[name])]  # fmt: skip
    if not rows:
        return []
    header = ("setting", "model", "mean exposure", "standard error at chance", "largest", "most",
              "p-value of nothing learned")  # fmt: skip
    return [
        f"## Canaries\n\n{CANARIES} secrets of digits among the records, **each of them once**, so "
        "that epsilon 8 is the price of a canary; rank among references of the same form. Chance "
        f"is {CHANCE:.2f} bits on average. One run each.\n\n" + results.table(header, rows)
    ]


def main() -> None:
    """Do the pieces that are missing, until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--most", type=int, help="training records; default all")
    given = parser.parse_args()
    end, base, out, device = time.monotonic() + given.seconds, given.base, given.out, given.device
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "e2e_test.jsonl").is_file():
        prepare(given.data, out, most=given.most)
    path, found = out / "results.json", {}
    for part in sorted(out.glob("results*.json")):  # pieces may come from several machines
        found |= json.loads(part.read_text())
    found["records"] = len((out / "sst2.tsv").read_text(encoding="utf-8").splitlines()) - 1
    pieces = {"step": lambda: step_time(base, out, device), "head": lambda: head(base, out, device)}
    pieces["plain"] = lambda: plain(base, out, device)
    for train in RATES:
        pieces[f"trials-{train}"] = lambda t=train: trials(t, base, out, device)
    for train, epsilon in RUNS:
        pieces[f"sst2-{train}-{epsilon}"] = lambda t=train, e=epsilon: sst2(
            t, e, base, out, device, rate=found[f"trials-{t}"]["rate"]
        )
    pieces["e2e"] = lambda: e2e(base, out, device)
    pieces["canaries"] = lambda: canaries(given.data, out)
    for name, piece in pieces.items():
        is_wanted = not given.only or name in given.only
        if is_wanted and name not in found and time.monotonic() < end:
            began = time.monotonic()
            found[name] = piece() | {"seconds": round(time.monotonic() - began, 1)}
            found["measured"] = _machine(device)
            path.write_text(json.dumps(found, indent=1))
            print(name, {k: v for k, v in found[name].items() if k != "curve"}, flush=True)
    write(found, base)


if __name__ == "__main__":
    main()

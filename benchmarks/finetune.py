"""Private fine-tuning in miniature: SST-2, E2E and canaries on one CPU core.

    python benchmarks/finetune.py DATA PACKAGES OUT [--seconds 500]

DATA is the folder of sst2_*.tsv.gz, e2e_*.csv.gz and wikitext2_*.txt.gz; PACKAGES is where Debian's
wordnet-base and dict-gcide were unpacked (`dpkg-deb -x`). Results of the pieces are kept in OUT: a
benchmark that was stopped goes on where it was, and no new piece is begun after `--seconds`.

A decoder of 0.4 million weights is trained on public text, then fine-tuned on 20,000 records of
SST-2, in full and by LoRA, at epsilon 3 and 8. The share of the gap closed is
(private - head) / (plain - head): `head` is a logistic regression on the last hidden state of the
pretrained decoder, and `plain` the same fine-tuning without privacy. Settings were fixed before the
first run; nothing was chosen on the dev set. One seed each.
"""

import argparse
import csv
import gzip
import json
import random
import time
from pathlib import Path

import _results as results
import numpy as np
import torch
from _public_text import pretrain

from tacit.experiments import Recipe
from tacit.text import finetune

PRETRAINING = 120.0  # CPU seconds
RECORDS, EPOCHS, LENGTH = 20_000, 3, 24
RUNS = [(train, epsilon) for train in ("full", "lora") for epsilon in (8, 3)]


def prepare(data: Path, out: Path) -> None:
    """Write the subset of SST-2, its dev set, and E2E in lower case."""
    with gzip.open(data / "sst2_train.tsv.gz", "rt", encoding="utf-8") as stream:
        rows = [line.rstrip("\n").split("\t") for line in stream][1:]
    random.Random(0).shuffle(rows)
    with gzip.open(data / "sst2_dev.tsv.gz", "rt", encoding="utf-8") as stream:
        dev = [line.rstrip("\n").split("\t") for line in stream][1:]
    for name, part in (("sst2.tsv", rows[:RECORDS]), ("sst2_dev.tsv", dev)):
        lines = ["label\ttext", *("\t".join(row) for row in part)]
        (out / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, most in (("e2e_dev", None), ("e2e_test", 300)):
        with gzip.open(data / f"{name}.csv.gz", "rt", encoding="utf-8") as stream:
            found = [{k: v.lower() for k, v in row.items()} for row in csv.DictReader(stream)]
        random.Random(0).shuffle(found)
        lines = [json.dumps(row) for row in found[:most]]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def sst2(train: str, epsilon: float, out: Path) -> dict:
    """Fine-tune on SST-2, with a twin without privacy at epsilon 8; return the facts that count."""
    recipe = Recipe.from_dict(
        {
            "method": "finetune",
            "name": f"sst2-{train}",
            "text": {
                "path": "sst2.tsv",
                "public_test": "sst2_dev.tsv",
                "classes": ["0", "1"],
                "length": LENGTH,
                "is_public": True,
            },
            "language_model": {"path": "base"},
            "finetune": {"task": "classification", "train": train, "epochs": EPOCHS,
                         "lora_rank": 16, "max_microbatch": 512},
            "privacy": {"epsilon": float(epsilon), "delta": 1e-5},
            "run": {"baseline_steps": 3000 if epsilon == 8 else 0, "baseline_rate": 2e-3},
        }
    )  # fmt: skip
    facts = finetune(recipe, out / f"sst2-{train}-{epsilon}", root=out)
    twin = facts.utility.non_private
    return {
        "epsilon": facts.epsilon,
        "accuracy": facts.utility.mean,
        "plain": twin[0].value if twin else None,
        "steps": facts.steps,
        "batch": facts.hyperparameters["batch_size"],
        "noise": facts.hyperparameters["noise_multiplier"],
    }


def head(out: Path) -> dict:
    """Return the accuracy of a logistic regression on the decoder's last hidden state."""
    from sklearn.linear_model import LogisticRegression
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(out / "base"), AutoTokenizer.from_pretrained(
        out / "base"
    )  # fmt: skip

    def features(name: str) -> tuple[np.ndarray, np.ndarray]:
        lines = (out / name).read_text(encoding="utf-8").splitlines()[1:]
        labels, texts = zip(*(line.split("\t") for line in lines), strict=True)
        ids = np.full((len(texts), LENGTH), tokenizer.pad_token_id)
        last = np.zeros(len(texts), int)
        for row, text in enumerate(texts):
            body = tokenizer(text, add_special_tokens=False)["input_ids"][: LENGTH - 2]
            tokens = [tokenizer.bos_token_id, *body, tokenizer.eos_token_id]
            ids[row, : len(tokens)], last[row] = tokens, len(tokens) - 1
        parts = []
        with torch.no_grad():
            for start in range(0, len(ids), 512):
                hidden = model(torch.from_numpy(ids[start : start + 512])).last_hidden_state
                rows = torch.arange(len(hidden))
                parts.append(hidden[rows, torch.from_numpy(last[start : start + 512])])
        return torch.cat(parts).numpy(), np.array(labels)

    x, y = features("sst2.tsv")
    found = LogisticRegression(max_iter=500).fit(x, y)
    return {"accuracy": float(found.score(*features("sst2_dev.tsv")))}


def e2e(out: Path) -> dict:
    """Fine-tune on E2E with canaries, private and not; return perplexities, samples, exposures."""
    recipe = Recipe.from_dict(
        {
            "method": "finetune",
            "name": "e2e",
            "text": {
                "path": "e2e_dev.jsonl",
                "public_test": "e2e_test.jsonl",
                "text": "ref",
                "prompt": "mr",
                "length": 72,
                "is_public": True,
            },
            "language_model": {"path": "base"},
            "finetune": {"epochs": 3, "max_microbatch": 256},
            "canaries": {"count": 10, "repeats": 16, "references": 200},
            "samples": {"count": 2, "prompts": ["name[blue spice], eattype[pub], area[riverside]"]},
            "privacy": {"epsilon": 8.0, "delta": 1e-5},
            "run": {"baseline_steps": 3000, "baseline_rate": 2e-3},
        }
    )
    run = out / "e2e-8"
    facts = finetune(recipe, run, root=out)
    return {
        "epsilon": facts.epsilon,
        "perplexity": facts.utility.mean,
        "plain": facts.utility.non_private[0].value,
        "samples": json.loads((run / "samples.json").read_text())["samples"],
        "exposure": json.loads((run / "exposure.json").read_text()),
        "steps": facts.steps,
        "batch": facts.hyperparameters["batch_size"],
        "noise": facts.hyperparameters["noise_multiplier"],
    }


def write(found: dict) -> None:
    """Write the results of the pieces that are there."""
    curve = found.get("pretraining", {})
    intro = (
        "In miniature, on one CPU core beside other work: not the 12-million decoder, the full "
        f"67,349 sentences or a GPU. Decoder: {curve.get('what', 'not trained yet')}. "
        f"SST-2: {RECORDS:,} of the 67,349 training sentences, {EPOCHS} epochs, {LENGTH} tokens, "
        "accuracy on the 872 dev sentences (standard error about 1.3 points), delta 1e-5, one seed."
    )
    blocks, base = [intro], found.get("head", {}).get("accuracy")
    rows = []
    for train, epsilon in RUNS:
        one, eight = found.get(f"sst2-{train}-{epsilon}"), found.get(f"sst2-{train}-8")
        if one is None or eight is None or base is None:
            rows.append((train, epsilon, *["not run"] * 5))
            continue
        share = (one["accuracy"] - base) / (eight["plain"] - base)
        rows.append((train, epsilon, f"{base:.1%}", f"{one['accuracy']:.1%}",
                     f"{eight['plain']:.1%}", f"{share:.0%}",
                     f"{one['batch']:,} x {one['steps']}, noise {one['noise']:.3f}"))  # fmt: skip
    blocks.append("## SST-2\n\n" + results.table(
        ("trained", "epsilon", "linear head", "private", "without privacy", "gap closed", "plan"),
        rows,
    ))  # fmt: skip
    if "e2e" in found:
        one = found["e2e"]
        blocks.append(
            f"## E2E\n\n4,672 records of the dev part, 3 epochs, epsilon {one['epsilon']:.2f}: "
            f"perplexity of reference tokens on 300 test records {one['perplexity']:.2f}, without "
            f"privacy {one['plain']:.2f} (batch {one['batch']}, {one['steps']} steps, noise "
            f"{one['noise']:.3f})."
        )
        rows = [(s["prompt"], s["text"].replace("|", "/")) for s in one["samples"]]
        blocks.append(results.table(("prompt", "sample of the private model"), rows))
        canaries = one["exposure"]
        rows = [(name, f"{v['mean']:.2f}", f"{max(v['bits']):.2f}", f"{v['p_value']:.2g}")
                for name, v in canaries["models"].items()]  # fmt: skip
        blocks.append(
            f"## Canaries\n\n10 secrets of 6 digits, {canaries['repeats']} times each, among the "
            f"E2E records; rank among {canaries['references']} references. Chance is "
            f"{canaries['chance']:.2f} bits on average; the most is log2(201) = 7.65.\n\n"
            + results.table(("model", "mean exposure", "largest", "p-value"), rows)
        )
    results.write("finetune", "Private fine-tuning in miniature",
                  ("tacit", "torch", "transformers", "peft"), *blocks)  # fmt: skip


def main() -> None:
    """Do the pieces that are missing, until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("packages", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=500.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    end, out = time.monotonic() + given.seconds, given.out
    (out / "base").mkdir(parents=True, exist_ok=True)
    if not (out / "sst2.tsv").is_file():
        prepare(given.data, out)
    path = out / "results.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    pieces = {"head": lambda: head(out)}
    pieces |= {f"sst2-{t}-{e}": lambda t=t, e=e: sst2(t, e, out) for t, e in RUNS[:2]}
    pieces["e2e"] = lambda: e2e(out)
    pieces |= {f"sst2-{t}-{e}": lambda t=t, e=e: sst2(t, e, out) for t, e in RUNS[2:]}
    if "pretraining" not in found:
        left = end - time.monotonic()
        words = pretrain(given.data, given.packages, out / "base", seconds=left, total=PRETRAINING)
        if words is None:
            return
        found["pretraining"] = {"what": words}
        path.write_text(json.dumps(found))
    for name, piece in pieces.items():
        if name not in found and time.monotonic() < end:
            began = time.process_time()
            found[name] = piece() | {"seconds": round(time.process_time() - began, 1)}
            path.write_text(json.dumps(found, indent=1))
            print(name, found[name], flush=True)
    write(found)


if __name__ == "__main__":
    main()

"""Public text and a small decoder that is trained on it, for `benchmarks/finetune.py`.

The text: WikiText-2's validation and test part (Merity et al. 2016), glosses and examples of
WordNet (Debian wordnet-base), and the GNU Collaborative International Dictionary of English (Debian
dict-gcide). It is in lower case, as SST-2 is. None of it is from SST-2 or E2E.
"""

import gzip
import random
import re
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tacit.text import train_tokenizer

VOCABULARY, LENGTH, BATCH = 4096, 64, 32


def public_lines(text: Path, packages: Path) -> list[str]:
    """Return the public texts, shuffled; `packages` is where the two packages were unpacked."""
    lines = []
    for part in ("valid", "test"):
        with gzip.open(text / f"wikitext2_{part}.txt.gz", "rt", encoding="utf-8") as stream:
            lines += [line.strip().replace("<unk>", "") for line in stream if len(line) > 80]
    for path in sorted((packages / "usr/share/wordnet").glob("data.*")):
        found = path.read_text(encoding="utf-8").splitlines()
        glosses = (line.partition(" | ")[2].strip() for line in found if " | " in line)
        lines += [re.sub(r'[";()]', "", gloss) for gloss in glosses]
    with gzip.open(packages / "usr/share/dictd/gcide.dict.dz", "rt", errors="replace") as stream:
        entries = re.split(r"\n\s*\n", stream.read())
    for entry in entries:
        plain = " ".join(re.sub(r"\[[^]]*\]|--.*|[{}\\]", " ", entry).split())
        if len(plain) > 60:
            lines.append(plain)
    random.Random(0).shuffle(lines)
    return [line.lower() for line in lines]


def decoder(tokenizer: PreTrainedTokenizerFast, *, width: int = 64, layers: int = 2):
    """Return a Llama of about 0.4 million weights, with tied embeddings and random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=11 * width // 4,
        num_hidden_layers=layers, num_attention_heads=width // 32, max_position_embeddings=256,
        tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def pretrain(text: Path, packages: Path, out: Path, *, seconds: float, total: float) -> str | None:
    """Train the decoder to `total` CPU seconds, or for `seconds` on the clock, and save it.

    Called again, it goes on where it stopped. Returns what was trained, once it is done.
    """
    state_file, end = out / "pretraining.pt", time.monotonic() + seconds
    lines = public_lines(text, packages)
    tokenizer = (
        PreTrainedTokenizerFast.from_pretrained(out)
        if (out / "tokenizer.json").is_file()
        else train_tokenizer(lines[:200_000], size=VOCABULARY)
    )
    tokenizer.save_pretrained(out)
    model = decoder(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    spent, step, curve = 0.0, 0, []
    if state_file.is_file():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        spent, step, curve = state["spent"], state["step"], state["curve"]
    ids, per_step = [], BATCH * LENGTH
    for line in lines[(len(lines) // 40) * (step // 100 % 40) :]:
        ids += [tokenizer.bos_token_id, *tokenizer.encode(line, add_special_tokens=False)]
        if len(ids) > 4_000_000:
            break
    first, loss, started = step, 0.0, time.process_time() - spent
    while (now := time.process_time() - started) < total and time.monotonic() < end:
        start = (step - first) * per_step % (len(ids) - per_step)
        batch = torch.tensor(ids[start : start + per_step]).view(BATCH, LENGTH)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 100) * max(0.02, 1 - now / total)
        logits = model(batch).logits[:, :-1]
        error = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        error.backward()
        loss = error.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            curve.append([step, round(now, 1), round(loss, 4)])
            print(curve[-1], flush=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    done = time.process_time() - started
    torch.save(state | {"spent": done, "step": step, "curve": curve}, state_file)
    model.save_pretrained(out)
    words = f"{model.num_parameters():,} weights, {step:,} steps on {step * per_step:,} tokens of "
    words += f"public text in {done:.0f} CPU s, last loss {loss:.2f}"
    print(words, flush=True)
    return words if done >= total else None

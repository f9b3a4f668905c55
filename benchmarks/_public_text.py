"""Public text and a small decoder that is trained on it, for `benchmarks/finetune.py`.

    python benchmarks/_public_text.py prepare DATA PACKAGES OUT   # tokenizer and tokens
    python benchmarks/_public_text.py pretrain OUT MODEL [--seconds 110]   # the decoder

The text: WikiText-2's validation and test part (Merity et al. 2016), glosses and examples of
WordNet (Debian wordnet-base), the GNU Collaborative International Dictionary of English (Debian
dict-gcide), and prose of the Linux documentation (Debian linux-doc-6.1). It is in lower case with
spaces around punctuation, as SST-2 is. None of it is from SST-2 or E2E.

A document is <s> and its sentences, each followed by </s>. So the state at </s> has to predict the
next sentence of its document, and says something about the sentences before it.
"""

import argparse
import gzip
import json
import lzma
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

VOCABULARY, LENGTH, BATCH = 12_288, 128, 256
WIDTH, LAYERS = 320, 6
RATE, WARM_UP = 2e-3, 200
_TOKENS = "tokens.xz"
_HELD = 40  # one document of so many is held out
_MARKS = re.compile(r"([.,;:!?()\"])")


def documents(text: Path, packages: Path) -> list[list[str]]:
    """Return the public documents as lists of sentences, shuffled.

    `packages` is where the Debian packages were unpacked (`dpkg-deb -x`).
    """
    share = packages / "usr/share"
    found = [*_wikipedia(text), *_wordnet(share), *_dictionary(share), *_manuals(share)]
    random.Random(0).shuffle(found)
    return found


def _wikipedia(text: Path) -> Iterator[list[str]]:
    for part in ("valid", "test"):
        with gzip.open(text / f"wikitext2_{part}.txt.gz", "rt", encoding="utf-8") as stream:
            for line in stream:
                if len(line) > 80:
                    yield _sentences(line.replace("<unk>", "").replace(" @-@ ", "-"))


def _wordnet(share: Path) -> Iterator[list[str]]:
    for path in sorted((share / "wordnet").glob("data.*")):
        for lines in _batched(path.read_text(encoding="utf-8").splitlines(), 8):
            parts = []
            for line in lines:
                words, _, gloss = line.partition(" | ")
                if gloss:
                    name = words.split()[4].replace("_", " ").split("(")[0]
                    parts += [f"{name}: {gloss.split(';')[0]}", *re.findall(r'"([^"]+)"', gloss)]
            yield [_plain(part) for part in parts]


def _dictionary(share: Path) -> Iterator[list[str]]:
    with gzip.open(share / "dictd/gcide.dict.dz", "rt", errors="replace") as stream:
        entries = re.split(r"\n\s*\n", stream.read())
    for block in _batched(entries, 6):
        yield [
            sentence
            for entry in block
            for sentence in _sentences(re.sub(r"\\[^\\]*\\|\[[^]]*\]|--.*|[{}\\]", " ", entry))
        ]


def _manuals(share: Path) -> Iterator[list[str]]:
    for path in sorted((share / "doc/linux-doc-6.1/Documentation").rglob("*.rst.gz")):
        if "translations" in path.parts:
            continue
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as stream:
            paragraphs = re.split(r"\n\s*\n", stream.read())
        prose = [
            p for p in paragraphs if re.match(r"[A-Z][a-z]* ", p) and "." in p and "::" not in p
        ]
        for block in _batched(prose, 6):
            yield [sentence for p in block for sentence in _sentences(re.sub(r"[`*_]", "", p))]


def _sentences(text: str) -> list[str]:
    parts = re.split(r"(?<=[.!?])\s+(?=[A-Z])", text)
    return [_plain(part) for part in parts if len(part) > 20]


def _plain(text: str) -> str:
    return " ".join(_MARKS.sub(r" \1 ", text).replace("'s ", " 's ").lower().split())


def _batched(values: list[Any], size: int) -> Iterator[list[Any]]:
    return (values[start : start + size] for start in range(0, len(values), size))


def prepare(text: Path, packages: Path, out: Path) -> None:
    """Write the tokenizer and the tokens of all documents."""
    from tacit.text import train_tokenizer

    found = documents(text, packages)
    tokenizer = train_tokenizer((s for d in found for s in d), size=VOCABULARY)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    training, held = [], []
    for number, sentences in enumerate(found):
        ids = [tokenizer.bos_token_id]
        for body in (
            tokenizer(sentences, add_special_tokens=False)["input_ids"] if sentences else ()
        ):
            ids += [*body, tokenizer.eos_token_id]
        (training if number % _HELD else held).append(np.array(ids, np.uint16))
    tokens = np.concatenate([*held, *training])
    sizes = {"held": sum(map(len, held)), "training": sum(map(len, training))}
    sizes |= {"characters": sum(len(s) for d in found for s in d), "documents": len(found)}
    sizes |= {"vocab_size": len(tokenizer), "bos_token_id": tokenizer.bos_token_id}
    sizes |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (out / "tokens.json").write_text(json.dumps(sizes))
    (out / _TOKENS).write_bytes(lzma.compress(tokens.tobytes()))
    print(sizes, (out / _TOKENS).stat().st_size)


def decoder(tokens: dict[str, int], *, width: int = WIDTH, layers: int = LAYERS) -> nn.Module:
    """Return a Llama of at most 12 million weights, with tied embeddings and random weights.

    `tokens` holds the size of the vocabulary and the numbers of its special tokens.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers,
        num_attention_heads=width // 64, max_position_embeddings=256, tie_word_embeddings=True,
        use_cache=False, **tokens,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def pretrain(
    folder: Path,
    out: Path,
    *,
    seconds: float,
    batch: int = BATCH,
    width: int = WIDTH,
    layers: int = LAYERS,
) -> dict:
    """Train the decoder for some seconds after its first step, and save it in half precision.

    The learning rate falls to 0 with the time. Returns what was done.
    """
    start, device = time.monotonic(), "cuda" if torch.cuda.is_available() else "cpu"
    sizes = json.loads((folder / "tokens.json").read_text())
    raw = lzma.decompress((folder / _TOKENS).read_bytes())
    tokens = torch.from_numpy(np.frombuffer(raw, np.uint16).astype(np.int32)).to(device)
    held, training = tokens[: sizes["held"]], tokens[sizes["held"] :]
    named = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    model = decoder({name: sizes[name] for name in named}, width=width, layers=layers).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
    )

    def loss_of(ids: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            logits = model(input_ids=ids).logits[:, :-1]
        return cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    compiled = torch.compile(loss_of) if device == "cuda" else loss_of
    try:
        compiled(_windows(training, batch)).backward()
    except Exception as error:
        print(f"not compiled: {type(error).__name__}: {str(error)[:200]}", flush=True)
        compiled = loss_of
        compiled(_windows(training, batch)).backward()
    ready = time.monotonic()
    curve, step, spent = [], 0, 0.0
    while (spent := time.monotonic() - ready) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP) * (1 - spent / seconds)
        optimizer.zero_grad()
        loss = compiled(_windows(training, batch))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 20 == 0 and device == "cuda":
            torch.cuda.synchronize()  # so that the time is that of the steps
        if step % 500 == 0:
            curve.append([step, round(spent, 1), round(loss.item(), 3)])
            print(curve[-1], flush=True)
    found = {
        "weights": sum(p.numel() for p in model.parameters()),
        "steps": step,
        "tokens": step * batch * LENGTH,
        "unique": sizes["training"],
        "characters": sizes["characters"],
        "seconds": round(spent, 1),
        "first step after": round(ready - start, 1),
        "loss": round(_held_loss(loss_of, held), 4),
        "curve": curve,
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
    }
    out.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(out, max_shard_size="12MB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((folder / name).read_bytes())
    (out / "pretraining.json").write_text(json.dumps(found, indent=1))
    print({name: value for name, value in found.items() if name != "curve"}, flush=True)
    return found


def _windows(tokens: Tensor, batch: int) -> Tensor:
    """Return stretches of LENGTH tokens that begin at random places."""
    starts = torch.randint(len(tokens) - LENGTH, (batch, 1), device=tokens.device)
    return tokens[starts + torch.arange(LENGTH, device=tokens.device)].long()


def _held_loss(loss_of, held: Tensor) -> float:
    rows = held[: len(held) // LENGTH * LENGTH].long().view(-1, LENGTH)
    with torch.no_grad():
        return float(np.mean([loss_of(part).item() for part in rows.split(64)]))


def words(found: dict) -> str:
    """Return a sentence about the pretraining."""
    return (
        f"{found['weights']:,} weights; {found['steps']:,} steps on {found['tokens']:,} tokens "
        f"({found['unique']:,} different ones) in {found['seconds']:.0f} s on {found['device']}; "
        f"{found['loss']:.3f} nats a token on held-out public text"
    )


def main() -> None:
    """Prepare the text, or train the decoder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=["prepare", "pretrain"])
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=LAYERS)
    given = parser.parse_args()
    if given.part == "prepare":
        prepare(*given.paths)
    else:
        size = {"width": given.width, "layers": given.layers}
        pretrain(*given.paths, seconds=given.seconds, batch=given.batch, **size)


if __name__ == "__main__":
    main()

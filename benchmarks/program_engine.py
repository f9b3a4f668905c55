"""The traced program of one example: architectures, its steps beside an older tree's, its start.

    git worktree add ../old 72941bfe
    python benchmarks/program_engine.py --old ../old

Every number comes from a child process of its own with one thread, which is told in JSON what to
measure. Times are processor times, medians of interleaved turns. `--parts`, `--models` and
`--architectures` choose a part, so that the benchmark can be tried on two models.
"""

import argparse
import copy
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests" / "training" / "program"
PARTS = ("architectures", "steps", "start")
EXAMPLES = 16  # of a lot, when an architecture is measured
RECORDS = 40  # of a data set, in lots
MODES = ("plain", "old", "new")

# Models ------------------------------------------------------------------------------------------


class Workload:
    """A model, its loss and its records; with torch imported by the child process alone."""

    def __init__(self, name: str) -> None:
        import torch

        torch.manual_seed(0)
        self.name, _, layout = name.partition(", ")
        self.model, self.loss_fn, self.batch_size, one = _BUILDERS[self.name]()
        records = RECORDS * self.batch_size
        self.records = tuple(
            torch.randn(records, *shape) if high is None else torch.randint(high, (records, *shape))
            for high, shape in one
        )
        if layout == "channels last":
            self.model = self.model.to(memory_format=torch.channels_last)
            plain = self.loss_fn

            def loss_fn(model: Any, batch: Any) -> Any:
                x, *rest = batch
                return plain(model, (x.contiguous(memory_format=torch.channels_last), *rest))

            self.loss_fn = loss_fn

    def plain_step(self) -> Callable[[], None]:
        """Return a function that takes an ordinary step on the next records."""
        import torch

        model = copy.deepcopy(self.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        place = 0

        def step() -> None:
            nonlocal place
            batch = tuple(t[place : place + self.batch_size] for t in self.records)
            place = (place + self.batch_size) % len(self.records[0])
            optimizer.zero_grad()
            self.loss_fn(model, batch).mean().backward()
            optimizer.step()

        return step

    def private(self, *, steps: int) -> Any:
        """Return a private run with default arguments."""
        import torch

        import tacit

        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        return tacit.make_private(
            self.model, optimizer, self.records, self.loss_fn, batch_size=self.batch_size,
            steps=steps, clip_norm=1.0, noise_multiplier=1.0,
        )  # fmt: skip


def _cross_entropy(model: Any, batch: Any) -> Any:
    from torch.nn.functional import cross_entropy

    x, y = batch
    return cross_entropy(model(x), y, reduction="none")


def _of_logits(model: Any, batch: Any) -> Any:
    from torch.nn.functional import cross_entropy

    x, y = batch
    return cross_entropy(model(x).logits, y, reduction="none")


def _next_word(model: Any, batch: Any) -> Any:
    from torch.nn.functional import cross_entropy

    (ids,) = batch
    logits = model(input_ids=ids).logits[:, :-1]
    losses = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids), -1).mean(1)


def _network(kind: str, batch_size: int, size: tuple[int, ...]) -> Any:
    import _models

    return getattr(_models, kind)(), _cross_entropy, batch_size, ((None, size), (10, ()))


def _transformer(kind: str, head: str, batch_size: int, depth: int, width: int) -> Any:
    import transformers

    names = {
        "vocab_size": 1000, "hidden_size": width, "n_embd": width, "num_hidden_layers": depth,
        "n_layer": depth, "num_attention_heads": width // 32, "n_head": width // 32,
        "intermediate_size": 4 * width, "max_position_embeddings": 64, "n_positions": 64,
        "image_size": 32, "patch_size": 4, "num_channels": 3, "num_labels": 10,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": None,
    }  # fmt: skip
    of_gpt = "n_embd", "n_layer", "n_head", "n_positions", "vocab_size"
    if kind == "GPT2":
        names = {k: v for k, v in names.items() if k in of_gpt or k.endswith("_pdrop")}
    config = getattr(transformers, f"{kind}Config")(**names)
    config.use_cache = False
    model = getattr(transformers, f"{kind}{head}")(config)
    if head == "ForImageClassification":
        return model, _of_logits, batch_size, ((None, (3, 32, 32)), (10, ()))
    if head == "ForSequenceClassification":
        return model, _of_logits, batch_size, ((1000, (64,)), (10, ()))
    return model, _next_word, batch_size, ((1000, (64,)),)


def _recurrent(kind: str) -> Any:
    from torch import nn

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = getattr(nn, kind)(128, 128, batch_first=True)
            self.head = nn.Linear(128, 10)

        def forward(self, x: Any) -> Any:
            return self.head(self.cell(x)[0][:, -1])

    return Classifier(), _cross_entropy, 64, ((None, (32, 128)), (10, ()))


def _table() -> Any:
    from torch import nn

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(50_000, 64), nn.Linear(64, 10)

        def forward(self, ids: Any) -> Any:
            return self.head(self.table(ids).mean(1))

    return Bag(), _cross_entropy, 64, ((50_000, (32,)), (10, ()))


def _resnet() -> Any:
    """ResNet-18 with GroupNorm for images of 32 x 32 pixels."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self, a: int, b: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.GroupNorm(16, b), nn.ReLU(),
                nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.GroupNorm(16, b),
            )  # fmt: skip
            same = stride == 1 and a == b
            short = (nn.Conv2d(a, b, 1, stride, bias=False), nn.GroupNorm(16, b))
            self.short = nn.Identity() if same else nn.Sequential(*short)

        def forward(self, x: Any) -> Any:
            return (self.body(x) + self.short(x)).relu()

    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(16, 64)]
    for a, b, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        layers += [Block(a, b, stride), Block(b, b, 1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    return model, _cross_entropy, 8, ((None, (3, 32, 32)), (10, ()))


_BUILDERS: dict[str, Callable[[], Any]] = {
    "CNN": lambda: _network("mnist_cnn", 128, (1, 28, 28)),
    "MLP": lambda: _network("mlp", 128, (1, 28, 28)),
    "GPT-2-mini": lambda: _transformer("GPT2", "LMHeadModel", 16, 2, 128),
    "ViT": lambda: _transformer("ViT", "ForImageClassification", 32, 3, 96),
    "ResNet-18-GN": _resnet,
    "LSTM": lambda: _recurrent("LSTM"),
    "GRU": lambda: _recurrent("GRU"),
    "table 50,000 x 64": _table,
    "BERT": lambda: _transformer("Bert", "ForSequenceClassification", 16, 4, 128),
    "Llama": lambda: _transformer("Llama", "ForCausalLM", 16, 4, 128),
}
STEPS = [*_BUILDERS, "CNN, channels last", "ResNet-18-GN, channels last"]

# In the child process ----------------------------------------------------------------------------


def seconds_of(turns: int, *steps: Callable[[], object]) -> list[float]:
    """Return the median processor time of each step, in turns one after the other."""
    found: list[list[float]] = [[] for _ in steps]
    for _ in range(turns):
        for step, times in zip(steps, found, strict=True):
            began = time.process_time()
            step()
            times.append(time.process_time() - began)
    return [statistics.median(times) for times in found]


def peak() -> float:
    """Return the largest resident memory so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # KiB on Linux


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def architecture(name: str, way: str) -> dict[str, float]:
    """Measure one architecture: `way` is "time", or whose memory."""
    import torch

    sys.path.insert(0, str(TESTS))
    from architectures import ARCHITECTURES

    from tacit.training import Flat
    from tacit.training.examples import Examples
    from tacit.training.program import mapped
    from tacit.training.program.programs import Programs
    from tacit.training.tree import map_rows, n_rows

    def trace(model: Any, loss_fn: Any, batch: Any) -> float:
        began = time.process_time()
        Programs.of(model, loss_fn, 1).prepare(batch)
        return time.process_time() - began

    tiny = torch.nn.Linear(2, 1)  # the first trace of a process loads parts of torch
    first = trace(tiny, lambda model, batch: model(batch[0]).squeeze(1), (torch.ones(2, 2),))
    model, loss_fn, batch = ARCHITECTURES[name]()
    places = torch.arange(EXAMPLES) % n_rows(batch)
    batch = map_rows(lambda t: t[places], batch)
    examples = Examples(model, loss_fn, batch, torch.ones(EXAMPLES, dtype=torch.bool))
    traced = trace(model, loss_fn, batch)

    def plain() -> None:
        model.zero_grad()
        loss_fn(model, batch).mean().backward()

    steps = {"plain": plain, "new": lambda: mapped.run(examples, Flat(1.0))}
    if way == "time":
        for step in steps.values():
            step()
        of_plain, of_new = seconds_of(11, *steps.values())
        return {"plain": of_plain, "new": of_new, "trace": traced, "first": first}
    before = peak()
    for _ in range(3):
        steps[way]()
    return {"peak": peak() - before}


def step(name: str, mode: str) -> dict[str, float]:
    """Measure one way to take a step: "plain", or private by the "old" or the "new" engine."""
    warmup, turns = 4, 25
    workload = Workload(name)
    if mode == "plain":
        take = workload.plain_step()
    else:
        private = workload.private(steps=warmup + turns)
        lots: Iterator[Any] = iter(private)

        def take() -> None:
            private.step(next(lots))

    for _ in range(warmup):
        take()
    before = faults()
    (seconds,) = seconds_of(turns, take)
    return {"seconds": seconds, "faults": (faults() - before) / turns}


def start(name: str) -> dict[str, float]:
    """Measure the time from make_private to the end of the first step."""
    import torch

    from tacit.training.program.programs import Programs

    workload = Workload(name)
    (plain,) = seconds_of(7, workload.plain_step())
    began = time.process_time()
    tiny = torch.nn.Linear(2, 1)
    loss_fn = lambda model, batch: model(batch[0]).squeeze(1)  # noqa: E731
    Programs.of(tiny, loss_fn, 1).prepare((torch.ones(2, 2),))
    first = time.process_time() - began
    began, clock = time.process_time(), time.perf_counter()
    private = workload.private(steps=2)
    private.step(next(iter(private)))
    seconds = time.process_time() - began
    return {
        "plain": plain,
        "first": first,
        "seconds": seconds,
        "clock": time.perf_counter() - clock,
    }


CHILDREN: dict[str, Callable[..., dict[str, float]]] = {
    "architecture": architecture,
    "step": step,
    "start": start,
}

# In the main process -----------------------------------------------------------------------------


def child(tree: Path, kind: str, *arguments: str) -> dict[str, float] | None:
    """Return what a child process measures with the library of a tree; None if it failed."""
    environment = os.environ | {
        "PYTHONPATH": f"{tree}{os.pathsep}{HERE}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(Path(__file__).resolve()), "--child", kind, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{kind} {arguments} failed: {done.stderr.strip()[-300:]}", flush=True)
        return None
    print(kind, *arguments, done.stdout.strip().splitlines()[-1], flush=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def of_architectures(names: list[str]) -> list[list[str]]:
    rows, ratios = [], []
    for name in names:
        tree = HERE.parent
        found = [child(tree, "architecture", name, way) for way in ("time", "plain", "new")]
        times, plain, new = found
        if times is None or plain is None or new is None:
            rows.append([name, "runs in the loop", "", "", "", ""])
            continue
        ratios.append(times["new"] / times["plain"])
        peaks = f"{plain['peak']:.1f}", f"{new['peak']:.1f}"
        milliseconds = f"{1e3 * times['trace']:.0f}", f"{1e3 * times['plain']:.1f}"
        rows.append([name, *milliseconds, f"{ratios[-1]:.2f}", *peaks])
    if ratios:
        rows.append(["**median**", "", "", f"{statistics.median(ratios):.2f}", "", ""])
    return rows


def of_steps(names: list[str], old: Path, pairs: int) -> list[list[str]]:
    rows, medians = [], []
    for name in names:
        found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        for turn in range(pairs):
            for mode in MODES if turn % 2 else reversed(MODES):
                result = child(old if mode == "old" else HERE.parent, "step", name, mode)
                if result is not None:
                    found[mode].append(result)
        if not all(len(results) == pairs for results in found.values()):
            rows.append([name, *[""] * 6, "failed"])
            continue
        of_pairs = list(zip(*found.values(), strict=True))
        new_over_old = [new["seconds"] / old["seconds"] for _, old, new in of_pairs]
        medians.append(statistics.median(new_over_old))
        seconds = {m: statistics.median(r["seconds"] for r in found[m]) for m in MODES}
        pages = {m: statistics.median(r["faults"] for r in found[m]) for m in MODES}
        rows.append(
            [
                name,
                f"{1e3 * seconds['plain']:.1f}",
                f"{seconds['old'] / seconds['plain']:.2f}",
                f"**{seconds['new'] / seconds['plain']:.2f}**",
                f"**{medians[-1]:.2f}**",
                f"{min(new_over_old):.2f} to {max(new_over_old):.2f}",
                " / ".join(f"{pages[m]:.0f}" for m in MODES),
            ]
        )
    if medians:
        rows.append(["**median**", "", "", "", f"**{statistics.median(medians):.2f}**", "", ""])
    return rows


def of_starts(names: list[str]) -> list[list[str]]:
    rows = []
    for name in names:
        found = child(HERE.parent, "start", name)
        if found is not None:
            allowed = max(10 * found["plain"], 1.0)
            rows.append(
                [
                    name,
                    f"{found['seconds']:.2f}",
                    f"{found['seconds'] / found['plain']:.1f}",
                    f"{allowed:.2f}",
                    f"{found['clock']:.2f}",
                    f"{found['first']:.2f}",
                ]
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--old", type=Path, help="a worktree of the commit to compare with")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--models", default=";".join(STEPS), help="separated by semicolons")
    parser.add_argument("--architectures", help="separated by commas; all if absent")
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.child:
        warnings.simplefilter("ignore")
        kind, *rest = arguments.child
        print(json.dumps(CHILDREN[kind](*rest)), flush=True)
        return
    from _results import table, write

    parts, blocks = arguments.parts.split(","), []
    models = arguments.models.split(";")
    if "architectures" in parts:
        sys.path.insert(0, str(TESTS))
        from architectures import ARCHITECTURES

        names = arguments.architectures
        rows = of_architectures(list(ARCHITECTURES) if names is None else names.split(","))
        header = ("model", "trace, ms", "plain, ms", "private / plain", "plain", "private")
        blocks += [
            f"## Architectures\n\nSmall models with random weights, lots of {EXAMPLES} examples. "
            "Plain is forward and backward, private the clipped sum, both without an optimizer, in "
            "turns in one process. A trace includes the second one and what else is done once, but "
            "not the first of the process. The last two columns are MiB of resident memory at its "
            "peak (ru_maxrss) above the state before three such steps, each in its own process.",
            table(header, rows),
        ]
    if "steps" in parts and arguments.old is not None:
        rows = of_steps(models, arguments.old, arguments.pairs)
        header = (
            "model", "plain, ms", "old / plain", "new / plain", "new / old", "pairs",
            "page faults a step, plain / old / new",
        )  # fmt: skip
        blocks += [
            "## Steps\n\n`private.step` with default arguments against that of "
            f"{_commit(arguments.old)}, and a plain step with SGD on batches of the expected size; "
            "each in a process of "
            f"its own, in turns, {arguments.pairs} of each. Medians of 25 steps, then of the "
            "processes; "
            "new / old is the median of its pairs.",
            table(header, rows),
        ]
    if "start" in parts:
        header = (
            "model", "processor s", "plain steps", "bar, s", "elapsed s", "first trace, s",
        )  # fmt: skip
        blocks += [
            "## Start\n\nFrom the call of `make_private` to the end of the first step, torch and a "
            "first tiny trace before it. The first trace of a process loads parts of torch, which "
            "is stated apart. The bar is the larger of ten plain steps and 1 s.",
            table(header, of_starts(models)),
        ]
    packages = ("tacit", "torch", "transformers", "peft", "numpy")
    write("program-engine", 'The engine "program"', packages, *blocks)


def _commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()

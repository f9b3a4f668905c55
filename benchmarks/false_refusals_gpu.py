"""Does `make_private` accept large models in bfloat16 on a GPU? One process per model.

    python benchmarks/false_refusals_gpu.py [NAME ...] [--calls 20] [--processes 1]

Random weights and records. A model is accepted if all fresh calls of `make_private` and three
private steps after each of them succeed. Without a GPU the models are made tiny, which only tests
this script.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from _large_models import Llama, ViT
from _models import GPT, LoRA, cross_entropy, next_token
from false_refusals import count_refusals, in_processes, report
from torch import Tensor, nn

ON_GPU = torch.cuda.is_available()
TINY_LLAMA = {"vocabulary": 256, "width": 64, "depth": 2, "heads": 4, "groups": 2, "inner": 96}
TINY_VIT = {"size": 32, "width": 32, "depth": 2, "heads": 4}
TINY_GPT = {"vocabulary": 256, "length": 64, "width": 64, "depth": 2}


def llama() -> nn.Module:
    return Llama(**({} if ON_GPU else TINY_LLAMA)).bfloat16()


def llama_lora() -> nn.Module:
    model = Llama(**({} if ON_GPU else TINY_LLAMA)).requires_grad_(False)
    for block in model.blocks:
        for name in ("q_proj", "v_proj"):
            setattr(block, name, LoRA(getattr(block, name)))
    return model.bfloat16()


def vit() -> nn.Module:
    return ViT(**({} if ON_GPU else TINY_VIT))


def gpt2() -> nn.Module:
    return GPT(**({} if ON_GPU else TINY_GPT))


def texts(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 50_000 if ON_GPU else 256, (n, 65), device=device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def pictures(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    size = 224 if ON_GPU else 32
    x = torch.randn(n, 3, size, size, device=device)
    return x, torch.randint(0, 1000, (n,), device=device)


# name: (model, records, losses). Llama's weights are bfloat16; the others use autocast.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Callable[..., Any]]] = {
    "llama-1b": (llama, texts, next_token),
    "llama-1b-lora": (llama_lora, texts, next_token),
    "vit-b-16": (vit, pictures, cross_entropy),
    "gpt2": (gpt2, texts, next_token),
}


def try_one(name: str, calls: int) -> None:
    """Run one model in this process and print what came of it."""
    torch.manual_seed(0)
    device = torch.device("cuda" if ON_GPU else "cpu")
    build, records, losses = MODELS[name]
    with device:
        model = build()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return losses(model, batch)

    count_refusals(model, records(256, device), loss_fn, calls=calls, batch_size=16)


def main() -> None:
    """Try every model in a process of its own; on a GPU write results/false-refusals-gpu.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one process")
    options = parser.parse_args()
    if options.one:
        try_one(options.names[0], options.calls)
        return
    names = options.names or list(MODELS)
    rows = in_processes(
        __file__, names, calls=options.calls, limit=options.limit, processes=options.processes
    )
    if ON_GPU:
        title = f"Refusals in bfloat16 on {torch.cuda.get_device_name()}, {options.calls} calls"
        report("false-refusals-gpu", title, ("tacit", "torch"), rows)


if __name__ == "__main__":
    main()

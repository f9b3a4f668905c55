"""Label privacy on MNIST: a convolutional network trained on randomized labels.

    python benchmarks/local_labels.py --out results.json

One stage: every label is randomized among all ten, and the forward-corrected loss is trained. Two
stages (Ghazi et al. 2021, Algorithm 3): a network trained on the randomized labels of the first
part of the examples gives each other example a prior, with which its label is randomized; a second
network is trained on all of them. Each label is randomized once, so both cost epsilon. Images are
public. Runs on a GPU where there is one; needs torch.
"""

import argparse
import gzip
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from _label_prior import PriorLabels, forward_loss
from torch import nn

DATA = Path(os.environ.get("TACIT_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
EPSILONS = (1.0, 2.0, 4.0)
FIRST_SHARE = 0.5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read(name: str) -> np.ndarray:
    """Read an idx file of unsigned bytes."""
    raw = gzip.decompress((DATA / "mnist" / name).read_bytes())
    n_dimensions = raw[3]
    shape = np.frombuffer(raw, ">u4", n_dimensions, 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * n_dimensions).reshape(shape)


def network() -> nn.Module:
    """A small convolutional network: 220,000 weights, so that one CPU core trains it in minutes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 49, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.3),
        nn.Linear(128, 10),
    ).to(DEVICE)  # fmt: skip


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Move each image of a batch by up to two pixels, zero beyond the border."""
    padded = nn.functional.pad(x, (2, 2, 2, 2))
    down, right = torch.randint(0, 5, (2, len(x)), device=x.device)
    rows = (torch.arange(28, device=x.device) + down[:, None])[:, None, :, None]
    columns = (torch.arange(28, device=x.device) + right[:, None])[:, None, None, :]
    batch = torch.arange(len(x), device=x.device)[:, None, None, None]
    return padded[batch, torch.zeros_like(batch), rows, columns]


def train(x, noisy, table, epochs: int, seed: int) -> nn.Module:
    """Train by AdamW in one cycle of the learning rate; `table` is P(noisy | true) per example."""
    torch.manual_seed(seed)
    model, batch = network(), 256
    steps = epochs * (len(x) // batch)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x), device=DEVICE).split(batch):
            if len(rows) < batch:
                continue
            loss = forward_loss(model(shifted(x[rows])), noisy[rows], table[rows]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def probabilities(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Class probabilities of all images."""
    return torch.cat([model(part).softmax(1) for part in x.split(2000)])


def to_device(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.as_tensor(values, dtype=dtype, device=DEVICE)


def one_run(data, epsilon: float | None, seed: int, epochs: int) -> dict[str, float]:
    """Accuracy of both methods on the test images; no epsilon gives the clean labels."""
    x, y, x_test, y_test = data
    labels = PriorLabels(epsilon=epsilon or 29.0, n_classes=10)
    rng = np.random.default_rng(seed)
    noisy = labels.randomize(y, rng)
    flat = to_device(labels.transitions()[0], torch.float32)

    def score(model: nn.Module) -> float:
        return float((probabilities(model, x_test).argmax(1).cpu().numpy() == y_test).mean())

    tables = flat.expand(len(y), 10, 10)
    model = train(x, to_device(noisy, torch.long), tables, epochs, seed)
    found = {"one stage": score(model)}
    if epsilon is None:
        return found
    order = rng.permutation(len(y))
    first, second = np.split(order, [int(FIRST_SHARE * len(y))])
    teacher = train(
        x[first], to_device(noisy[first], torch.long), tables[: len(first)], epochs, seed
    )
    prior = probabilities(teacher, x[second]).double().cpu().numpy()
    renewed, whole = (
        noisy.copy(),
        np.tile(labels.transitions()[0].astype(np.float32), (len(y), 1, 1)),
    )
    renewed[second] = labels.with_prior(y[second], prior, rng)
    whole[second] = labels.transitions(prior, len(second))
    model = train(x, to_device(renewed, torch.long), to_device(whole, torch.float32), epochs, seed)
    return found | {"two stages": score(model)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    images, tests = read("train-images-idx3-ubyte.gz"), read("t10k-images-idx3-ubyte.gz")
    data = (
        to_device(images[:, None] / 255.0, torch.float32),
        read("train-labels-idx1-ubyte.gz").astype(np.int64),
        to_device(tests[:, None] / 255.0, torch.float32),
        read("t10k-labels-idx1-ubyte.gz").astype(np.int64),
    )
    rows = []
    for seed in range(options.seeds):
        for epsilon in (*EPSILONS, None):
            start = time.perf_counter()
            found = one_run(data, epsilon, seed, options.epochs)
            rows.append({"epsilon": epsilon, "seed": seed, **found})
            print(rows[-1], f"{time.perf_counter() - start:.0f} s", flush=True)
            save(options, rows)


def save(options: argparse.Namespace, rows: list[dict[str, object]]) -> None:
    """Write what is known so far."""
    versions = {"torch": torch.__version__, "numpy": np.__version__, "epochs": options.epochs}
    options.out.write_text(json.dumps({"runs": rows, **versions}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The models that training is measured on: one builder each, with the batch it is fed."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Workload(NamedTuple):
    """A model, its loss for each example, and a maker of random batches."""

    build: Callable[[], nn.Module]
    losses: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]
    batch: Callable[[int, torch.device], tuple[Tensor, Tensor]]
    batch_size: int
    autocast: bool = False
    channels_last: bool = False
    microbatch: int | None = None


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def binary(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.binary_cross_entropy_with_logits(model(x).squeeze(-1), y, reduction="none")


def next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    logits = model(x)
    losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
    return losses.view(y.shape).mean(1)


def mnist_cnn() -> nn.Module:
    """The network of the DP-SGD tutorials of TensorFlow Privacy and Opacus."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 10))


class Residual(nn.Module):
    """Pre-activation block of a wide residual network, with GroupNorm."""

    def __init__(self, width_in: int, width_out: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(16, width_in)
        self.conv1 = nn.Conv2d(width_in, width_out, 3, stride, 1, bias=False)
        self.norm2 = nn.GroupNorm(16, width_out)
        self.conv2 = nn.Conv2d(width_out, width_out, 3, 1, 1, bias=False)
        same = width_in == width_out
        self.short = None if same else nn.Conv2d(width_in, width_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x))
        skip = x if self.short is None else self.short(y)
        return skip + self.conv2(F.relu(self.norm2(self.conv1(y))))


def wide_resnet() -> nn.Module:
    """WRN-16-4 (Zagoruyko & Komodakis 2016) with GroupNorm, as De et al. 2022 train it."""
    widths = [16, 64, 128, 256]
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1)]
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [Residual(a, b, 1 if i == 0 else 2), Residual(b, b, 1)]
    layers += [nn.GroupNorm(16, 256), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


class LoRA(nn.Module):
    """A frozen linear layer with a trained low-rank correction (Hu et al. 2022)."""

    def __init__(self, linear: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        split = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, d // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(n, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A transformer of GPT-2 small's shape; the output layer has weights of its own.

    The vocabulary of 50,257 is padded to a multiple of 64, as is usual: other widths are slow.
    """

    def __init__(
        self, *, vocabulary: int = 50_304, length: int = 512, width: int = 768, depth: int = 12
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        x = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def with_lora(model: nn.Module, rank: int = 16) -> nn.Module:
    """All parameters frozen; every linear layer of the blocks gets a trained correction."""
    model.requires_grad_(False)
    for block in model.blocks:  # type: ignore[union-attr]
        for name in ("qkv", "proj", "up", "down"):
            setattr(block, name, LoRA(getattr(block, name), rank))
    return model


class LSTMClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10_000, 128)
        self.lstm = nn.LSTM(128, 128, batch_first=True)
        self.out = nn.Linear(128, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(ids))[0][:, -1])


class BagOfTokens(nn.Module):
    """A large table: the mean of the rows that a record names, and a linear layer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 64)
        self.out = nn.Linear(64, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.embed(ids).mean(1))


def images(channels: int, size: int) -> Callable[[int, torch.device], tuple[Tensor, Tensor]]:
    def make(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, channels, size, size, device=device)
        return x, torch.randint(0, 10, (n,), device=device)

    return make


def tokens(vocabulary: int, length: int) -> Callable[[int, torch.device], tuple[Tensor, Tensor]]:
    def make(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        x = torch.randint(0, vocabulary, (n, length + 1), device=device)
        return x[:, :-1].contiguous(), x[:, 1:].contiguous()

    return make


def documents(vocabulary: int, length: int) -> Callable[[int, torch.device], tuple[Tensor, Tensor]]:
    def make(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        x = torch.randint(0, vocabulary, (n, length), device=device)
        return x, torch.randint(0, 2, (n,), device=device)

    return make


def table(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 11, device=device), torch.randint(0, 2, (n,), device=device).float()


WORKLOADS = {
    "logistic": Workload(lambda: nn.Linear(11, 1), binary, table, 10_000),
    "mlp": Workload(mlp, cross_entropy, images(1, 28), 1_024),
    "cnn-256": Workload(mnist_cnn, cross_entropy, images(1, 28), 256),
    "cnn-2048": Workload(mnist_cnn, cross_entropy, images(1, 28), 2_048),
    "lstm": Workload(LSTMClassifier, cross_entropy, documents(10_000, 64), 256),
    "table-50k": Workload(lambda: BagOfTokens(50_000), cross_entropy, documents(50_000, 32), 256),
    "table-1m": Workload(
        lambda: BagOfTokens(1_000_000), cross_entropy, documents(1_000_000, 32), 256
    ),
    "wrn-16-4": Workload(
        wide_resnet, cross_entropy, images(3, 32), 4_096, True, True, microbatch=1_024
    ),
    "gpt2": Workload(GPT, next_token, tokens(50_304, 512), 32, True),
    "gpt2-lora": Workload(lambda: with_lora(GPT()), next_token, tokens(50_304, 512), 32, True),
}

"""Small random programs: layers in any order, tied and reused weights, writes, flat losses.

`random_program(seed)` gives a model, its loss, batches of several sizes, and changes between them.
"""

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

WIDTH, IDS, LENGTH = 4, 7, 5


class Program(NamedTuple):
    model: nn.Module
    loss_fn: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    batches: list[tuple[Tensor, ...]]
    changes: list[Callable[[], None]]  # one before each batch
    names: list[str]  # of the blocks


class Blocks(nn.Module):
    """Blocks of (rows, length, WIDTH) features; `lengths` says how many positions a row has."""

    def __init__(self, first: nn.Module, blocks: list[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last
        self.is_residual = False

    def forward(self, ids: Tensor, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.first(ids, x, lengths)
        for block in self.blocks:
            h = h + block(h, lengths) if self.is_residual else block(h, lengths)
        return self.last(h, lengths)


class Block(nn.Module):
    """`function(block, *inputs)` with the given modules and parameters as attributes."""

    def __init__(self, function: Callable[..., Tensor], **parts: object) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 2)


def linear(**options: bool) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **options)


# First blocks: (ids, x, lengths) -> (rows, length, WIDTH) -----------------------------------------


def embedded(choose: random.Random) -> Block:
    padding = choose.choice([None, 2, -1])
    table = nn.Embedding(IDS, WIDTH, padding_idx=padding)
    if choose.random() < 0.4:
        return Block(lambda m, i, x, n: m.t(i) + m.p[: i.shape[1]], t=table, p=parameter(9, WIDTH))
    if choose.random() < 0.4:
        return Block(lambda m, i, x, n: m.t[i] * m.t[2:4].sum(), t=parameter(IDS, WIDTH))
    return Block(lambda m, i, x, n: m.t(i) + x, t=table)


def bagged(choose: random.Random) -> Block:
    options = {"mode": choose.choice(["sum", "mean", "max"])}
    options["include_last_offset"] = choose.random() < 0.5
    is_weighted = options["mode"] == "sum" and choose.random() < 0.7

    def run(m: Block, ids: Tensor, x: Tensor, lengths: Tensor) -> Tensor:
        taken = torch.arange(ids.shape[1]) < lengths[:, None]
        ends = F.pad(lengths.cumsum(0), (1, 0))
        starts = ends if m.bag.include_last_offset else ends[:-1]
        weights = x[..., 0].exp()[taken] if is_weighted else None
        bag = m.bag(ids[taken], starts, per_sample_weights=weights)
        return x + bag.unsqueeze(1)

    return Block(run, bag=nn.EmbeddingBag(IDS, WIDTH, **options))


def numeric(choose: random.Random) -> Block:
    del choose
    return Block(lambda m, i, x, n: m.l(x), l=linear())


# Inner blocks: (h, lengths) -> h of the same shape ------------------------------------------------


def dense(choose: random.Random) -> Block:
    activation = choose.choice([torch.tanh, F.relu, F.relu_, F.gelu])
    return Block(lambda m, h, n: activation(m.l(h)), l=linear(bias=choose.random() < 0.7))


def reused(choose: random.Random) -> Block:
    del choose
    return Block(lambda m, h, n: m.l(torch.tanh(m.l(h))) @ m.l.weight, l=linear())


def time_first(choose: random.Random) -> Block:
    is_zero = choose.random() < 0.5

    def run(m: Block, h: Tensor, lengths: Tensor) -> Tensor:
        steps = h.transpose(0, 1).flatten(0, 1)  # the examples vary fastest
        steps = torch.tanh(m.l(steps)).unflatten(0, (h.shape[1], -1)).transpose(0, 1)
        return h + m.o(steps)

    block = Block(run, l=linear(), o=linear(bias=False))
    if is_zero:
        nn.init.zeros_(block.o.weight)
    return block


def written(choose: random.Random) -> Block:
    kind = choose.randrange(4)

    def run(m: Block, h: Tensor, lengths: Tensor) -> Tensor:
        h = m.l(h)
        if kind == 0:
            h *= m.s
            h += m.s.exp()
        elif kind == 1:
            h = h.addcmul_(m.s, m.t).relu_()
        elif kind == 2:
            h[..., 1:3] *= m.s[1:3]
        else:
            buffer = torch.empty_like(h)
            buffer.copy_(m.s)
            h = h * buffer
        return h

    return Block(run, l=linear(), s=parameter(WIDTH), t=parameter(WIDTH))


def computed(choose: random.Random) -> Block:
    kind = choose.randrange(6)

    def run(m: Block, h: Tensor, lengths: Tensor) -> Tensor:
        if kind == 0:
            w = m.w.clone()
            w[0] = 0.0
            return F.linear(h, w)
        if kind == 1:
            w = m.w * 1
            h = h + w[0]
            w.mul_(2)
            return torch.tanh(h) * w[1]
        if kind == 2:
            return F.linear(h, m.w.t() * m.s) + F.linear(h, m.w)
        if kind == 3:
            return torch.einsum("btd,de,e->bte", h, m.w, m.s)
        if kind == 4:
            return torch.where(h > 0, m.s, h) * m.s.mean()
        return h @ torch.matrix_exp(m.w - m.w.t())

    return Block(run, w=parameter(WIDTH, WIDTH), s=parameter(WIDTH))


def parametrized(choose: random.Random) -> Block:
    layer = choose.choice([weight_norm, orthogonal])(linear())
    return Block(lambda m, h, n: m.l(h), l=layer)


def normalized(choose: random.Random) -> Block:
    kind = choose.randrange(5)
    layers = [nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.PReLU(), nn.PReLU(WIDTH)]
    if kind < 3:
        return Block(lambda m, h, n: m.l(h), l=layers[kind])
    if kind == 3:
        run = lambda m, h, n: m.l(h.transpose(1, 2)).transpose(1, 2)  # noqa: E731  # short
        norms = [nn.GroupNorm(2, WIDTH), nn.InstanceNorm1d(WIDTH, affine=True), layers[3]]
        return Block(run, l=choose.choice(norms))
    return Block(lambda m, h, n: m.l(h, h.sin()), l=nn.Bilinear(WIDTH, WIDTH, WIDTH))


def convolved(choose: random.Random) -> Block:
    groups, mode = choose.choice([1, 2, WIDTH]), choose.choice(["zeros", "circular"])
    kind = choose.randrange(3)
    options = {"padding": 1, "groups": groups}
    if kind == 0:
        layer = nn.Conv1d(WIDTH, WIDTH, 3, padding_mode=mode, **options)
    elif kind == 1:
        layer = nn.ConvTranspose1d(WIDTH, WIDTH, 3, **options)
    else:
        layer = nn.Conv2d(1, 1, 3, padding=1)
        return Block(lambda m, h, n: m.l(h.unsqueeze(1)).squeeze(1), l=layer)
    return Block(lambda m, h, n: m.l(h.transpose(1, 2)).transpose(1, 2), l=layer)


def attending(choose: random.Random) -> Block:
    is_first, is_shown = choose.random() < 0.5, choose.random() < 0.5
    options = {"add_bias_kv": choose.random() < 0.3, "add_zero_attn": choose.random() < 0.3}
    layer = nn.MultiheadAttention(WIDTH, 2, batch_first=is_first, **options)

    def run(m: Block, h: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(h.shape[1]) >= lengths.clamp_min(1)[:, None]
        x = h if is_first else h.transpose(0, 1)
        y = m.a(x, x.sin(), x, key_padding_mask=mask, need_weights=is_shown)[0]
        return y if is_first else y.transpose(0, 1)

    return Block(run, a=layer)


def grouped_attention(choose: random.Random) -> Block:
    is_causal = choose.random() < 0.5

    def run(m: Block, h: Tensor, lengths: Tensor) -> Tensor:
        rows, length, _ = h.shape
        q = m.q(h).view(rows, length, 2, 2).transpose(1, 2)
        k, v = (m.kv(h).view(rows, length, 2, 2)[:, :, i : i + 1].transpose(1, 2) for i in (0, 1))
        at = torch.arange(length)
        bias = -(at[:, None] - at).abs() * m.slope[:, None, None]
        if is_causal:
            bias = bias.masked_fill(at[:, None] < at, -math.inf)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
        return m.o(y.transpose(1, 2).flatten(2))

    return Block(run, q=linear(), kv=linear(bias=False), o=linear(), slope=parameter(2))


def recurrent(choose: random.Random) -> Block:
    kind = choose.choice([nn.LSTM, nn.GRU, nn.RNN])
    is_bi, is_first = choose.random() < 0.4, choose.random() < 0.5
    options = {"bidirectional": is_bi, "batch_first": is_first, "bias": choose.random() < 0.7}
    options["num_layers"] = choose.choice([1, 1, 2])
    is_packed, has_state = choose.random() < 0.4, choose.random() < 0.4
    hidden = WIDTH // 2 if is_bi else WIDTH
    layer = kind(WIDTH, hidden, **options)
    count = options["num_layers"] * (2 if is_bi else 1)

    def run(m: Block, h: Tensor, lengths: Tensor) -> Tensor:
        x = h if is_first else h.transpose(0, 1)
        state = None
        if has_state:
            state = m.h0.expand(-1, len(h), -1).contiguous()
            state = (state, state * 0.5) if kind is nn.LSTM else state
        if is_packed:
            lengths = lengths.clamp_min(1)
            x = pack_padded_sequence(x, lengths, batch_first=is_first, enforce_sorted=False)
        y, last = m.r(x, state)
        if is_packed:
            y, _ = pad_packed_sequence(y, batch_first=is_first, total_length=h.shape[1])
        last = last[0] if isinstance(last, tuple) else last
        y = y if is_first else y.transpose(0, 1)
        return y + last.sum((0, 2))[:, None, None]

    return Block(run, r=layer, h0=parameter(count, 1, hidden))


def adapted(choose: random.Random) -> Block:
    frozen = linear().requires_grad_(False)
    block = Block(lambda m, h, n: m.w(h) + m.b(m.a(h)), w=frozen, a=linear(), b=linear(bias=False))
    if choose.random() < 0.6:
        nn.init.zeros_(block.b.weight)  # as LoRA begins
    return block


def checkpointed(choose: random.Random) -> Block:
    inner = choose.choice([dense, computed, attending, normalized])(choose)

    def run(m: Block, h: Tensor, lengths: Tensor) -> Tensor:
        return checkpoint(lambda x: m.inner(x, lengths), h, use_reentrant=False)

    return Block(run, inner=inner)


def routed(choose: random.Random) -> Block:
    del choose

    def run(m: Block, h: Tensor, lengths: Tensor) -> Tensor:
        scores = m.r(h).softmax(-1)
        best = scores.argmax(-1, keepdim=True)
        parts = [
            torch.where(best == i, scores[..., i : i + 1] * e(h), 0.0) for i, e in enumerate(m.e)
        ]
        return sum(parts)

    return Block(run, r=nn.Linear(WIDTH, 2), e=nn.ModuleList([linear(), linear()]))


def spectral(choose: random.Random) -> Block:
    del choose

    def run(m: Block, h: Tensor, lengths: Tensor) -> Tensor:
        waves = torch.fft.rfft(h, dim=-1) * torch.view_as_complex(m.w)
        return torch.fft.irfft(waves, n=WIDTH, dim=-1)

    return Block(run, w=parameter(WIDTH // 2 + 1, 2))


def mapped(choose: random.Random) -> Block:
    del choose
    return Block(lambda m, h, n: torch.func.vmap(lambda row: torch.tanh(m.l(row)))(h), l=linear())


FIRST = [embedded, bagged, numeric]
INNER = [
    *(dense, reused, time_first, written, computed, parametrized, normalized, convolved),
    *(attending, grouped_attention, recurrent, adapted, checkpointed, routed, spectral, mapped),
]


# Last blocks and losses ---------------------------------------------------------------------------


def pooled(choose: random.Random) -> Block:
    block = Block(lambda m, h, n: m.o(h.mean(1)), o=nn.Linear(WIDTH, 3))
    if choose.random() < 0.4:
        nn.init.zeros_(block.o.weight)
    return block


def at_the_end(choose: random.Random) -> Block:
    del choose

    def run(m: Block, h: Tensor, lengths: Tensor) -> Tensor:
        return m.o(h[torch.arange(len(h)), (lengths - 1).clamp_min(0)])

    return Block(run, o=nn.Linear(WIDTH, 3))


def with_a_token(choose: random.Random) -> Block:
    del choose

    def run(m: Block, h: Tensor, lengths: Tensor) -> Tensor:
        h = torch.cat([m.c.expand(len(h), 1, WIDTH), h], 1)
        return m.a(h, h, h)[0][:, 0, :3]

    return Block(run, c=parameter(1, 1, WIDTH), a=nn.MultiheadAttention(WIDTH, 2, batch_first=True))


LAST = [pooled, at_the_end, with_a_token]


def cross_entropy(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(*batch[:3]), batch[3], reduction="none")


def flat_for_most(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    out = model(*batch[:3])
    return F.relu(out.square().sum(1) - 4.0 * (batch[3] != 1)) + 0.1 * out[:, 0] * (batch[3] == 1)


def one_by_one(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    out = model(*batch[:3])
    return torch.stack(
        [row[: 1 + int(y)].square().sum() for row, y in zip(out, batch[3], strict=True)]
    )


def with_a_penalty(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    penalty = sum(p.square().sum() for p in model.parameters())
    return cross_entropy(model, batch) + 0.01 * penalty


LOSSES = [cross_entropy, cross_entropy, flat_for_most, flat_for_most, one_by_one, with_a_penalty]


def random_program(seed: int, *, batches: int = 3, views: int = 1) -> Program:
    """Return the program of a seed, in float64, with batches of several sizes."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    makers = [choose.choice(FIRST), *choose.choices(INNER, k=choose.randint(1, 3))]
    makers.append(choose.choice(LAST))
    first, *inner, last = [maker(choose) for maker in makers]
    if len(inner) > 1 and choose.random() < 0.15:
        inner[-1] = inner[0]  # a whole block is used twice
    model = Blocks(first, inner, last).double()
    if choose.random() < 0.2:
        for p in list(model.parameters())[:: choose.randint(2, 4)]:
            p.requires_grad_(False)
    sizes = [choose.choice([1, 2, 3, WIDTH, LENGTH, LENGTH, 6, 9]) for _ in range(batches)]

    def change() -> None:
        if not any(p.requires_grad for p in model.parameters()):
            next(model.parameters()).requires_grad_(True)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
        model.is_residual = choose.random() < 0.3
        model.train(choose.random() < 0.7)

    return Program(
        model,
        choose.choice(LOSSES),
        [_batch(rows * views) for rows in sizes],
        [lambda: None, *[change] * (batches - 1)],
        [maker.__name__ for maker in makers],
    )


def _batch(rows: int) -> tuple[Tensor, ...]:
    ids = torch.randint(0, IDS, (rows, LENGTH))
    x = torch.randn(rows, LENGTH, WIDTH, dtype=torch.float64)
    return ids, x, torch.randint(0, LENGTH + 1, (rows,)), torch.randint(0, 3, (rows,))

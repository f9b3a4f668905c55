"""Every layer rule equals the loop, whatever the layer's options, shapes and way to the norm."""

import math
from types import SimpleNamespace

import looped_reference as reference
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from tacit.training import Flat, clipped_sum
from tacit.training.rules import convolution, ghost_norm

CLIP = Flat(0.5)
TOLERANCE = 2e-4  # norms are raised by a proved bound on rounding errors, so sums are shorter


class Apply(nn.Module):
    """`function(module, x)` with the given modules and parameters as attributes."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def total_of(model, batch):
    """A loss of each example that depends on every output, and not in the same way."""
    out = model(batch[0]).flatten(1)
    weights = torch.linspace(-1, 1, out.shape[1], dtype=out.dtype)
    return out.square().mean(1) + (out * weights).sum(1)


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape) / 2)


def frozen(module, *names):
    for name, p in module.named_parameters():
        if name in names:
            p.requires_grad_(False)
    return module


def check(model, *batch, loss_fn=total_of):
    expected = reference.looped(model, loss_fn, batch, CLIP)
    found = clipped_sum(model, loss_fn, batch, CLIP).sums
    assert list(found) == list(expected)
    assert reference.relative_error(found, expected) < TOLERANCE


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def reals(*shape):
    return torch.randn(*shape)


LINEAR = {
    "vectors": (lambda: nn.Linear(5, 3), (6, 5)),
    "sequences": (lambda: nn.Linear(5, 3), (6, 4, 5)),
    "four axes": (lambda: nn.Linear(5, 3, bias=False), (6, 2, 3, 5)),
    "one position": (lambda: nn.Linear(5, 3), (6, 1, 5)),
    "only the bias is trained": (lambda: frozen(nn.Linear(5, 3), "weight"), (6, 4, 5)),
    "only the weight is trained": (lambda: frozen(nn.Linear(5, 3), "bias"), (6, 4, 5)),
    "scalar output": (lambda: nn.Linear(11, 1), (6, 11)),
    "several layers": (
        lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh()),
        (6, 3, 5),
    ),
    "matrix on the right": (lambda: Apply(lambda m, x: x @ m.w, w=parameter(5, 3)), (6, 4, 5)),
    "transposed matrix": (lambda: Apply(lambda m, x: x @ m.w.T, w=parameter(3, 5)), (6, 4, 5)),
    "functional": (lambda: Apply(lambda m, x: F.linear(x, m.w), w=parameter(3, 5)), (6, 4, 5)),
    "addmm on merged axes": (
        lambda: Apply(
            lambda m, x: torch.addmm(m.b, x.view(-1, 5), m.w).view(len(x), -1, 3),
            w=parameter(5, 3),
            b=parameter(3),
        ),
        (6, 4, 5),
    ),
}

CONVOLUTION = {
    "1d": (lambda: nn.Conv1d(3, 4, 3), (6, 3, 9)),
    "2d strided": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), (6, 3, 9, 9)),
    "2d, one position": (lambda: nn.Conv2d(3, 4, 5), (6, 3, 5, 5)),
    "2d, stride leaves a rest": (lambda: nn.Conv2d(2, 3, 3, stride=3), (6, 2, 10, 11)),
    "2d dilated": (lambda: nn.Conv2d(3, 4, 3, dilation=(2, 1)), (6, 3, 9, 9)),
    "2d pointwise": (lambda: nn.Conv2d(3, 4, 1), (6, 3, 5, 5)),
    "2d in groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (6, 4, 7, 7)),
    "2d depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), (6, 4, 7, 7)),
    "2d, many channels": (lambda: nn.Conv2d(16, 32, 3, stride=2, padding=1), (6, 16, 9, 8)),
    "2d dilated, many channels": (lambda: nn.Conv2d(16, 16, (3, 2), dilation=2), (6, 16, 7, 7)),
    "2d in groups, many channels": (lambda: nn.Conv2d(32, 64, 3, groups=2), (6, 32, 9, 9)),
    "1d, many channels": (lambda: nn.Conv1d(32, 16, 3, padding=2), (6, 32, 9)),
    "3d, many channels": (lambda: nn.Conv3d(16, 16, 2), (6, 16, 4, 4, 3)),
    "1d transposed, output padding beyond the stride": (
        lambda: nn.ConvTranspose1d(16, 16, 3, dilation=3, output_padding=2),
        (6, 16, 7),
    ),
    "2d transposed, many channels": (
        lambda: nn.ConvTranspose2d(16, 32, 3, 2, 1, output_padding=1),
        (6, 16, 5, 5),
    ),
    "2d same, even kernel": (lambda: nn.Conv2d(3, 4, (4, 3), padding="same"), (6, 3, 7, 7)),
    "2d valid": (lambda: nn.Conv2d(3, 4, 3, padding="valid"), (6, 3, 7, 7)),
    "3d": (lambda: nn.Conv3d(2, 3, (1, 2, 3), padding=(0, 1, 1)), (6, 2, 3, 4, 5)),
    "1d transposed": (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2), (6, 3, 6)),
    "2d transposed": (
        lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1, groups=2),
        (6, 4, 5, 5),
    ),
    "2d transposed, dilated": (lambda: nn.ConvTranspose2d(3, 2, 3, dilation=2), (6, 3, 5, 5)),
    "3d transposed": (lambda: nn.ConvTranspose3d(2, 3, 2, bias=False), (6, 2, 3, 3, 3)),
    "only the bias is trained": (lambda: frozen(nn.Conv2d(3, 4, 3), "weight"), (6, 3, 5, 5)),
    "frames merged into the batch": (
        lambda: Apply(
            lambda m, x: m.c(x.flatten(0, 1)).unflatten(0, (-1, 2)), c=nn.Conv1d(3, 4, 3)
        ),
        (6, 2, 3, 7),
    ),
    **{
        f"2d, {mode} padding": (
            lambda mode=mode: nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode),
            (6, 3, 7, 7),
        )
        for mode in ("reflect", "replicate", "circular")
    },
}

NORMALIZATION = {
    "layer": (lambda: nn.LayerNorm(5), (6, 4, 5)),
    "layer over two axes": (lambda: nn.LayerNorm((4, 5)), (6, 4, 5)),
    "layer without shift": (lambda: nn.LayerNorm(5, bias=False), (6, 5)),
    "layer, scale frozen": (lambda: frozen(nn.LayerNorm(5), "weight"), (6, 4, 5)),
    "group": (lambda: nn.GroupNorm(2, 4), (6, 4, 5, 5)),
    "group, shift frozen": (lambda: frozen(nn.GroupNorm(4, 4), "bias"), (6, 4, 7)),
    "instance 1d": (lambda: nn.InstanceNorm1d(4, affine=True), (6, 4, 7)),
    "instance 2d": (lambda: nn.InstanceNorm2d(4, affine=True), (6, 4, 5, 5)),
    "rms": (lambda: nn.RMSNorm(5), (6, 4, 5)),
    "rms over two axes": (lambda: nn.RMSNorm((4, 5), eps=1e-3), (6, 4, 5)),
    "after a layer": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 3)
        ),
        (6, 3, 9, 9),
    ),
    "batch norm in eval mode": (lambda: nn.Sequential(nn.BatchNorm1d(5).eval()), (6, 5)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_matrix_products_equal_the_loop(name):
    build, shape = LINEAR[name]
    check(build(), reals(*shape))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", CONVOLUTION)
def test_convolutions_equal_the_loop(name):
    build, shape = CONVOLUTION[name]
    check(build(), reals(*shape))


@pytest.mark.parametrize("name", NORMALIZATION)
def test_normalizations_equal_the_loop(name):
    build, shape = NORMALIZATION[name]
    model = build()
    for p in model.parameters():
        torch.nn.init.normal_(p)
    check(model, reals(*shape))


@pytest.mark.parametrize("way", ["gram", "keep", "drop"])
@pytest.mark.parametrize("chunk", [1, 2**20], ids=["chunks of one", "one chunk"])
def test_every_way_to_the_norm_gives_the_same_sum(way, chunk, monkeypatch):
    monkeypatch.setattr(ghost_norm, "cheapest_way", lambda *_, **__: way)
    monkeypatch.setattr(ghost_norm, "CHUNK_ELEMENTS", {"cpu": chunk})
    check(nn.Linear(5, 3), reals(6, 4, 5))
    check(nn.Conv2d(4, 6, 3, groups=2), reals(6, 4, 7, 7))
    check(nn.ConvTranspose1d(4, 2, 3), reals(6, 4, 7))
    check(nn.Conv2d(5, 3, (3, 2), stride=2, dilation=(1, 3)), reals(6, 5, 9, 7))
    check(nn.Conv3d(5, 3, 2), reals(6, 5, 4, 3, 4))
    check(nn.Conv2d(16, 32, 3, stride=2), reals(6, 16, 7, 7))
    check(nn.ConvTranspose1d(32, 32, 3, groups=2, bias=False), reals(6, 32, 5))
    check(nn.ConvTranspose1d(16, 16, 3, dilation=3, output_padding=2), reals(6, 16, 7))
    check(frames_in_the_batch(), reals(6, 2, 16, 7))
    check(tied_language_model(), *text())


@pytest.mark.parametrize("way", ["gram", "keep", "drop"])
@pytest.mark.parametrize("channels", [5, 16], ids=["by patches", "by groups"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_image_that_is_not_finite_leaves_the_others_alone(way, channels, value, monkeypatch):
    monkeypatch.setattr(ghost_norm, "cheapest_way", lambda *_, **__: way)
    x = reals(6, channels, 5, 5)
    x[2, 1, 3, 3] = value
    check(nn.Conv2d(channels, 16, 3), x)


@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (3, 2), (2, 4)])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_room_for_rounding_is_not_below_what_the_positions_hold(stride, dilation, transposed):
    kind = nn.ConvTranspose1d if transposed else nn.Conv1d
    layer = kind(2, 3, 5, stride=stride, dilation=dilation, padding=1)
    x = reals(4, 2, 30)
    g = torch.randn_like(layer(x))
    geometry = convolution.Geometry((5,), [stride], [1], [dilation], transposed, [0], 1)
    gradient = convolution.Convolved(x, g, layer.weight, geometry, 4)
    left, right = gradient._operands(0, 4)
    exact = (left.norm(dim=2) * right.norm(dim=2)).sum(1)
    assert (gradient._lengths(0, 4) >= exact).all()


def test_a_gpu_convolves_in_eleven_bits_by_default(monkeypatch):
    with FakeTensorMode():
        x = torch.ones(2, device="cuda")
        assert ghost_norm.convolved_in(x) == torch.float16
        assert ghost_norm.convolved_in(x.double()) == torch.float64
        assert ghost_norm.convolved_in(x.bfloat16()) == torch.bfloat16
        monkeypatch.setattr(
            torch.backends.cudnn, "conv", SimpleNamespace(fp32_precision="ieee"), raising=False
        )
        assert ghost_norm.convolved_in(x) == torch.float32
    assert ghost_norm.convolved_in(torch.ones(2)) == torch.float32


@pytest.mark.parametrize("way", ["gram", "drop"])
@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4, 0.0])
def test_a_sum_in_eleven_bits_stays_within_the_clip_norm(way, size, monkeypatch):
    # As on a GPU, which takes the norm in all bits. Positions cancel but for `size`, and their
    # roundings do not: without room for these the sum has 3.6 times the clip norm.
    def reduced(g, x, *others):
        g, x = (((t.view(torch.int32) + 2**12) & -(2**13)).view(torch.float32) for t in (g, x))
        return torch.ops.aten.convolution_backward(g, x, *others)

    monkeypatch.setattr(ghost_norm, "cheapest_way", lambda *_, **__: way)
    monkeypatch.setattr(convolution, "convolved_in", lambda _: torch.float16)
    monkeypatch.setattr(convolution, "aten", SimpleNamespace(convolution_backward=reduced))
    torch.manual_seed(0)
    lengths, signs = torch.rand(1, 1, 2) + 0.5, torch.tensor([1.0, -1.0])
    x = lengths * torch.randn(1, 40, 1)
    g = signs * torch.randn(1, 60, 1) / lengths + size * torch.randn(1, 60, 2)
    layer = nn.Conv1d(40, 60, 1, bias=False)
    found = clipped_sum(layer, weighed_outputs, (x, 1e5 * g), CLIP)
    assert 0 < reference.norm_of(found.sums) <= CLIP.clip_norm


def frames_in_the_batch():
    """Two rows of a convolution for each example."""
    return Apply(lambda m, x: m.c(x.flatten(0, 1)).unflatten(0, (-1, 2)), c=nn.Conv1d(16, 16, 3))


def weighed_outputs(model, batch):
    """A loss whose gradient by the output is the second part of the batch."""
    x, g = batch
    return (model(x) * g).flatten(1).sum(1)


def canceling(positions, width, size):
    """Output gradients that cancel over the positions but for a ten-thousandth."""
    signs = torch.tensor([1.0, -1.0]).repeat(positions // 2).view(1, positions, 1)
    g = size * torch.randn(1, 1, width) * signs
    return g + 1e-4 * size * torch.randn(1, positions, width)


@pytest.mark.parametrize("way", ["gram", "keep", "drop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1e3, 1e5, 1e7])
def test_positions_that_cancel_do_not_hide_the_norm(way, dtype, size, monkeypatch):
    # The norm is far below the inner products that it is computed from.
    monkeypatch.setattr(ghost_norm, "cheapest_way", lambda *_, **__: way)
    allowed = 1.001 if dtype != torch.bfloat16 else 1.04
    for positions in (2, 4, 16):
        x = torch.randn(1, 1, 200).expand(1, positions, 200)
        linear = (nn.Linear(200, 300, bias=False), x, canceling(positions, 300, size))
        image = torch.randn(1, 48, 1).expand(1, 48, positions + 2)
        g = canceling(positions, 64, size).transpose(1, 2)
        by_patches = (nn.Conv1d(40, 60, 3, bias=False), image[:, :40], g[:, :60])
        by_groups = (nn.Conv1d(48, 64, 3, bias=False), image, g)
        for model, *batch in (linear, by_patches, by_groups):
            model, batch = model.to(dtype), [t.to(dtype) for t in batch]
            found = clipped_sum(model, weighed_outputs, batch, Flat(1.0))
            assert found.sums["weight"].double().norm() <= allowed


def test_a_table_that_is_read_and_used_as_a_matrix_does_not_hide_its_norm():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = parameter(7, 300)

        def forward(self, batch):
            ids, g, h, x = batch
            read = (F.embedding(ids, self.table) * g).flatten(1).sum(1)
            return read + (F.linear(x, self.table) * h).flatten(1).sum(1)

    g = 1e6 * torch.randn(1, 2, 300)
    h = torch.zeros(1, 2, 7)
    h[0, 0, 3], h[0, 1, 4] = 1.0, 1.0  # the head takes back what the reading gave
    batch = (torch.tensor([[3, 4]]), g, h, -g + 10 * torch.randn(1, 2, 300))
    found = clipped_sum(Tied(), lambda m, b: m(b), batch, Flat(1.0))
    assert found.sums["table"].norm() <= 1.001


def test_squares_below_the_range_of_float32_do_not_hide_the_norm():
    batch = torch.full((1, 784), 2e-23), torch.full((1, 1), 1e19)
    model, clip = nn.Linear(784, 1, bias=False), Flat(1e-3)
    found = clipped_sum(model, weighed_outputs, batch, clip)
    assert found.sums["weight"].norm() <= clip.clip_norm


def text(length=7):
    ids = torch.randint(0, 11, (6, length))
    return ids, ids.roll(1, 1)


def next_token_loss(model, batch):
    ids, targets = batch
    losses = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(len(ids), -1).sum(1)


class LanguageModel(nn.Module):
    """Tokens and positions in, logits out; the head may be the token table."""

    def __init__(self, *, tied, padding_idx=None, head="module"):
        super().__init__()
        self.tokens = nn.Embedding(11, 6, padding_idx=padding_idx)
        self.positions = nn.Embedding(9, 6)
        self.mix = nn.Linear(6, 6)
        self.kind = head
        if head == "module":
            self.head = nn.Linear(6, 11, bias=False)
            if tied:
                self.head.weight = self.tokens.weight

    def forward(self, ids):
        places = torch.arange(ids.shape[1])
        x = torch.tanh(self.mix(self.tokens(ids) + self.positions(places)))
        return self.head(x) if self.kind == "module" else x @ self.tokens.weight.T


def tied_language_model():
    model = LanguageModel(tied=True)
    return Apply(lambda m, ids: m.lm(ids), lm=model)


@pytest.mark.parametrize("padding_idx", [None, 0, -1])
@pytest.mark.parametrize("tied", [True, False])
def test_language_models_equal_the_loop(tied, padding_idx):
    model = LanguageModel(tied=tied, padding_idx=padding_idx)
    check(model, *text(), loss_fn=next_token_loss)


def test_head_that_reads_the_table_directly_equals_the_loop():
    check(LanguageModel(tied=True, head="direct"), *text(), loss_fn=next_token_loss)


def test_embeddings_of_one_id_and_of_a_matrix_of_ids_equal_the_loop():
    check(nn.Embedding(5, 3), torch.randint(0, 5, (6,)))
    check(nn.Embedding(5, 3), torch.randint(0, 5, (6, 2, 4)))
    check(Apply(lambda m, i: m.w[i], w=parameter(5, 3)), torch.randint(-5, 5, (6, 4)))


def test_embedding_bag_equals_the_loop():
    check(nn.EmbeddingBag(5, 3, mode="sum"), torch.randint(0, 5, (6, 4)))


def test_no_table_per_example_is_formed():
    table = nn.Embedding(200_000, 64)  # 51 MB; one per example would be 3 GB
    loss = lambda model, batch: model(batch[0]).square().sum((1, 2))  # noqa: E731
    found = clipped_sum(table, loss, (torch.randint(0, 200_000, (64, 3)),), CLIP)
    assert int((found.sums["weight"].abs().sum(1) > 0).sum()) <= 64 * 3


RECURRENT = {
    "LSTM": {},
    "GRU": {},
    "RNN": {},
    "LSTM, two layers, both ways": {"num_layers": 2, "bidirectional": True},
    "GRU, two layers, both ways": {"num_layers": 2, "bidirectional": True},
    "RNN, relu, no bias": {"nonlinearity": "relu", "bias": False},
    "LSTM, projected": {"proj_size": 3, "num_layers": 2},
}


class Recurrent(nn.Module):
    def __init__(self, kind, *, batch_first, **options):
        super().__init__()
        self.layer = getattr(nn, kind)(5, 6, batch_first=batch_first, **options)
        self.batch_first = batch_first

    def forward(self, x):
        output, state = self.layer(x if self.batch_first else x.transpose(0, 1))
        states = state if isinstance(state, tuple) else (state,)
        output = output if self.batch_first else output.transpose(0, 1)
        return torch.cat([output.flatten(1), *(s.transpose(0, 1).flatten(1) for s in states)], 1)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_equal_the_loop(name, batch_first):
    model = Recurrent(name.split(",")[0], batch_first=batch_first, **RECURRENT[name])
    check(model, reals(6, 6, 5))  # as many steps as examples


def test_recurrent_cells_used_at_every_step_equal_the_loop():
    def steps(m, x):
        first, second, third = None, x.new_zeros(len(x), 4), x.new_zeros(len(x), 3)
        for t in range(x.shape[1]):
            first = m.a(x[:, t], first)
            second = m.b(first[0], second)
            third = m.c(second, third)
        return torch.cat([second, third], 1)

    model = Apply(steps, a=nn.LSTMCell(5, 4), b=nn.GRUCell(4, 4), c=nn.RNNCell(4, 3))
    check(model, reals(6, 3, 5))


class Attention(nn.Module):
    def __init__(self, *, batch_first, cross=False, masked=False, need_weights=True, **options):
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options)
        self.batch_first, self.cross = batch_first, cross
        self.masked, self.need_weights, self.is_wide = masked, need_weights, "kdim" in options

    def forward(self, x):
        query = self.embed(x)
        memory = x if self.is_wide else query.tanh() if self.cross else query
        if not self.batch_first:
            is_self = memory is query
            query = query.transpose(0, 1)
            memory = query if is_self else memory.transpose(0, 1)
        length = x.shape[1]
        future = torch.ones(length, length).triu(1).bool() if self.masked else None
        padding = (x[:, :, 0] > 1) & (torch.arange(length) > 0) if self.masked else None
        out, shown = self.attend(
            query,
            memory,
            memory,
            attn_mask=future,
            key_padding_mask=padding,
            need_weights=self.need_weights,
        )
        out = out if self.batch_first else out.transpose(0, 1)
        return out if shown is None else torch.cat([out.flatten(1), shown.flatten(1)], 1)


ATTENTION = {
    "to itself": {},
    "to itself, fused": {"need_weights": False},
    "across": {"cross": True},
    "masked": {"cross": True, "masked": True},
    "masked, fused": {"masked": True, "need_weights": False},
    "other widths": {"kdim": 5, "vdim": 5},
    "extra keys": {"add_bias_kv": True, "add_zero_attn": True, "masked": True},
    "no bias": {"bias": False, "cross": True, "add_bias_kv": True},
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_equals_the_loop(name, batch_first):
    check(Attention(batch_first=batch_first, **ATTENTION[name]), reals(6, 6, 5))


@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_layers_equal_the_loop(batch_first):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
    move = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    model = Apply(lambda m, x: move(m.layer(move(m.embed(x)))), embed=nn.Linear(5, 8), layer=layer)
    check(model, reals(6, 6, 5))


class LoRA(nn.Module):
    """A frozen layer plus a trained product of two thin ones."""

    def __init__(self, width):
        super().__init__()
        self.base = frozen(nn.Linear(width, width), "weight", "bias")
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def standardized(m, x):
    mean, spread = m.w.mean((1, 2), keepdim=True), m.w.std((1, 2), keepdim=True)
    return F.conv1d(x, (m.w - mean) / (spread + 1e-5), m.b)


RAW = {
    "bias of its own": (lambda: Apply(lambda m, x: x + m.b, b=parameter(5)), (6, 4, 5)),
    "scale": (lambda: Apply(lambda m, x: (x * m.s).sin(), s=parameter(4, 1)), (6, 4, 5)),
    "positions": (lambda: Apply(lambda m, x: (m.p + x).sin(), p=parameter(1, 4, 5)), (6, 4, 5)),
    "token in front": (
        lambda: Apply(
            lambda m, x: torch.cat([m.t.expand(len(x), -1, -1), x], 1).sin().cumsum(1),
            t=parameter(1, 1, 5),
        ),
        (6, 4, 5),
    ),
    "learned initial state": (
        lambda: Apply(
            lambda m, x: m.r(x, m.h.repeat(1, len(x), 1))[0],
            r=nn.GRU(5, 3, batch_first=True),
            h=parameter(1, 1, 3),
        ),
        (6, 4, 5),
    ),
    "einsum": (
        lambda: Apply(lambda m, x: torch.einsum("btd,dp->bpt", x, m.w), w=parameter(5, 3)),
        (6, 4, 5),
    ),
    "masked weight": (
        lambda: Apply(lambda m, x: F.linear(x, m.w * (m.w > 0)), w=parameter(3, 5)),
        (6, 4, 5),
    ),
    "standardized weight": (
        lambda: Apply(standardized, w=parameter(4, 3, 3), b=parameter(4)),
        (6, 3, 8),
    ),
    "weight norm": (
        lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)),
        (6, 4, 5),
    ),
    "low rank update of a frozen weight": (
        lambda: Apply(
            lambda m, x: F.linear(x, torch.ones(3, 5, dtype=x.dtype) + m.b @ m.a),
            a=parameter(2, 5),
            b=parameter(3, 2),
        ),
        (6, 4, 5),
    ),
    "cast weight": (
        lambda: Apply(lambda m, x: F.linear(x, m.w.contiguous().to(x.dtype)), w=parameter(3, 5)),
        (6, 4, 5),
    ),
    "PReLU": (lambda: nn.Sequential(nn.Linear(5, 4), nn.PReLU(4)), (6, 5)),
    "bilinear, the input twice": (
        lambda: Apply(lambda m, x: m.l(x, x.sin()), l=nn.Bilinear(5, 5, 3)),
        (6, 5),
    ),
    "LoRA": (lambda: nn.Sequential(LoRA(5), nn.Tanh(), LoRA(5)), (6, 4, 5)),
}


@pytest.mark.parametrize("name", RAW)
def test_parameters_outside_known_layers_equal_the_loop(name):
    build, shape = RAW[name]
    check(build(), reals(*shape))


def twice(m, x):
    return m.b(torch.tanh(m.a(torch.tanh(m.a(x)))))


REUSED = {
    "linear twice": (lambda: Apply(twice, a=nn.Linear(5, 5), b=nn.Linear(5, 3)), (6, 5)),
    "linear twice on sequences": (
        lambda: Apply(twice, a=nn.Linear(5, 5), b=nn.Linear(5, 3)),
        (6, 4, 5),
    ),
    "convolution twice": (
        lambda: Apply(twice, a=nn.Conv1d(3, 3, 3, padding=1), b=nn.Conv1d(3, 2, 1)),
        (6, 3, 7),
    ),
    "normalization twice": (lambda: Apply(twice, a=nn.LayerNorm(5), b=nn.Linear(5, 3)), (6, 5)),
    "a weight and its transpose": (
        lambda: Apply(lambda m, x: torch.tanh(x @ m.w) @ m.w.T, w=parameter(5, 3)),
        (6, 4, 5),
    ),
    "a weight as it is and changed": (
        lambda: Apply(lambda m, x: F.linear(x, m.w) + F.linear(x, m.w.exp()), w=parameter(3, 5)),
        (6, 4, 5),
    ),
    "attention twice": (
        lambda: Apply(
            lambda m, x: m.a(m.a(x, x.sin(), x.cos())[0], x, x)[0],
            a=nn.MultiheadAttention(6, 2, batch_first=True),
        ),
        (5, 4, 6),
    ),
    "recurrent layer twice": (
        lambda: Apply(lambda m, x: m.r(m.r(x)[0])[0], r=nn.GRU(5, 5, batch_first=True)),
        (6, 4, 5),
    ),
}


@pytest.mark.parametrize("name", REUSED)
def test_reused_parameters_have_the_norm_of_the_sum(name):
    build, shape = REUSED[name]
    check(build(), reals(*shape))


def test_two_layers_tied_to_one_weight_have_the_norm_of_the_sum():
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    check(model, reals(6, 5))


def test_a_layer_that_is_never_used_gets_zeros():
    model = Apply(lambda m, x: m.a(x), a=nn.Linear(5, 3), unused=nn.Linear(2, 2))
    check(model, reals(6, 5))


def test_a_layer_whose_output_is_dropped_gets_zeros():
    def drop(m, x):
        m.unused(x)
        return m.a(x)

    check(Apply(drop, a=nn.Linear(5, 3), unused=nn.Linear(5, 2)), reals(6, 5))


def test_frozen_layers_between_trained_ones_pass_the_gradient_on():
    layers = [nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)]
    model = nn.Sequential(*layers)
    for p in [*model[2].parameters(), *model[3].parameters()]:
        p.requires_grad_(False)
    check(model, reals(6, 5))


def test_several_inputs_equal_the_loop():
    def loss_fn(model, batch):
        inputs, target = batch["inputs"], batch["target"]
        out = model.a(inputs[0]) * model.b(inputs[1])
        return (out.squeeze(-1) - target).square()

    model = Apply(None, a=nn.Linear(3, 1), b=nn.Linear(2, 1))
    flat = (reals(6, 3), reals(6, 2), reals(6))
    expected = reference.looped(
        model, lambda m, t: loss_fn(m, {"inputs": t[:2], "target": t[2]}), flat, CLIP
    )
    nested = {"inputs": [flat[0], flat[1]], "target": flat[2], "note": None}
    for way in (clipped_sum, reference.alone):
        found = way(model, loss_fn, nested, CLIP).sums
        assert reference.relative_error(found, expected) < TOLERANCE


def test_examples_that_vary_fastest_in_a_merged_axis_equal_the_loop():
    def time_first(m, x):
        length = x.shape[1]
        steps = x.transpose(0, 1).flatten(0, 1)  # (time * rows, features)
        return m.a(steps).unflatten(0, (length, -1)).transpose(0, 1)

    check(Apply(time_first, a=nn.Linear(5, 3)), reals(6, 4, 5))


def test_positions_as_long_as_the_batch_are_still_shared():
    model = LanguageModel(tied=False)
    check(model, *text(length=6), loss_fn=next_token_loss)  # 6 examples of 6 tokens


def test_loss_with_a_penalty_on_the_weights_equals_the_loop():
    def penalized(model, batch):
        return model(batch[0]).square().sum(1) + model.weight.square().sum()

    check(nn.Linear(5, 3), reals(6, 5), loss_fn=penalized)


@pytest.mark.parametrize("write", [F.relu_, lambda h: h.mul_(2), lambda h: h[:, 0].fill_(0.5)])
def test_the_result_of_a_layer_may_be_written_into(write):
    """With three axes and a bias, `F.linear` returns a view, and autograd protects views."""

    def written(parts, x):
        hidden = parts.layer(x)
        write(hidden)
        return hidden

    check(Apply(written, layer=nn.Linear(4, 3)), reals(6, 5, 4))

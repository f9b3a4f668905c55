"""Recurrent layers in the traced program: sums equal those of a loop over the examples."""

import pytest
import torch
from looped_reference import alone
from slow_cases import one_fast
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from tacit.training import Flat, PerGroup, PerLayer, clipped_sum, torch_internals
from tacit.training.program.programs import Programs
from tacit.training.rules.recurrent import LAYER, _backward_whole, _forward_whole

KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
CELLS = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "tanh": nn.RNNCell,
    "relu": lambda *sizes: nn.RNNCell(*sizes, nonlinearity="relu"),
}
IN, WIDTH, STEPS, EXAMPLES = 5, 6, 4, 7
every_kind = pytest.mark.parametrize("kind", KINDS)


class Program(nn.Module):
    """A recurrent layer, used as `use(layer, x)` says, and a linear layer on what that returns."""

    def __init__(self, layer: nn.Module, use, width: int = WIDTH, classes: int = 3) -> None:
        super().__init__()
        self.layer, self.use = layer, use
        self.start = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.last = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.use(self, x))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def lot(rows: int = EXAMPLES, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, STEPS, IN, dtype=dtype), torch.randint(3, (rows,))


def outputs(model: Program, x: Tensor) -> Tensor:
    return model.layer(x)[0].mean(1)


def time_first(model: Program, x: Tensor) -> Tensor:
    return model.layer(x.transpose(0, 1))[0].mean(0)


def final(model: Program, x: Tensor) -> Tensor:
    """Use the final states only: of the last layer, in both directions."""
    state = model.layer(x)[1]
    states = state if isinstance(state, tuple) else (state,)
    return sum(s[-1, :, :WIDTH] for s in states)


def twice(model: Program, x: Tensor) -> Tensor:
    return model.layer(x.flip(1) ** 2)[0].mean(1) + model.layer(x)[0].mean(1)


def tied(model: Program, x: Tensor) -> Tensor:
    """Use one weight outside of the layer too."""
    return outputs(model, x) + F.linear(x, model.layer.weight_ih_l0)[:, 0, :WIDTH]


def in_place(model: Program, x: Tensor) -> Tensor:
    return model.layer(x)[0].relu_().mean(1)


def from_state(of) -> object:
    """Return a use of the layer with the initial state `of(model, x)`, shape (1, rows, WIDTH)."""

    def use(model: Program, x: Tensor) -> Tensor:
        h = of(model, x)
        return model.layer(x, (h, 2 * h) if isinstance(model.layer, nn.LSTM) else h)[0].mean(1)

    return use


STATES = {
    "constant": lambda _, x: torch.full((1, len(x), WIDTH), 0.3, dtype=x.dtype),
    "example": lambda _, x: x[:, :1, :1].transpose(0, 1).expand(1, len(x), WIDTH).contiguous(),
    "shared": lambda model, x: model.start.expand(1, len(x), WIDTH).contiguous(),
}


def agree(model: nn.Module, batch, clip=None, tolerance: float = 1e-10, **options) -> None:
    clip = Flat(0.05) if clip is None else clip
    want = alone(model, loss_fn, batch, clip, **options)
    found = clipped_sum(model, loss_fn, batch, clip, **options)
    assert found.within.tolist() == want.within.tolist()
    for name, value in want.sums.items():
        assert (found.sums[name] - value).norm() <= tolerance * max(value.norm(), 1e-3), name
        assert found.sums[name].is_contiguous()


OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "two layers": {"num_layers": 2},
    "both directions": {"bidirectional": True, "num_layers": 2},
}


@every_kind
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("views", one_fast([1, 2], 2))
def test_sums_equal_those_of_a_loop(kind, name, views):
    layer = KINDS[kind](IN, WIDTH, batch_first=True, **OPTIONS[name])
    width = WIDTH * (2 if "bidirectional" in OPTIONS[name] else 1)
    model = Program(layer, outputs, width).double()
    batch = lot(views * EXAMPLES)
    apart = PerGroup((("layer.weight_hh_l0",), ("",)), (0.05, 0.1))  # weights of one layer
    for clip in (Flat(0.05), Flat(1e3), PerLayer.split(model, 0.1), apart):
        agree(model, batch, clip, augmentations=views)
    agree(model, batch, Flat(1e3), augmentations=views, bounded=True)
    agree(model, batch, augmentations=views, bounded=True, tolerance=1e-2)  # clips a little more


USES = {f.__name__: f for f in (time_first, final, twice, tied, in_place)}
USES |= {f"{name} state": from_state(of) for name, of in STATES.items()}


@every_kind
@pytest.mark.parametrize("use", USES)
def test_uses_of_a_layer(kind, use):
    model = Program(KINDS[kind](IN, WIDTH, batch_first=use != "time_first"), USES[use]).double()
    agree(model, lot())


@every_kind
def test_a_cell_is_a_layer_of_one_step(kind):
    def walk(model, x):
        state = None
        for step in x.unbind(1):
            state = model.layer(step, state)
        return state[0] if isinstance(state, tuple) else state

    agree(Program(CELLS[kind](IN, WIDTH), walk).double(), lot())


@pytest.mark.parametrize("layers", [1, 2])
def test_projections(layers):
    layer = nn.LSTM(IN, 8, layers, batch_first=True, bidirectional=True, proj_size=WIDTH)
    agree(Program(layer, outputs, 2 * WIDTH).double(), lot())
    agree(Program(layer, final).double(), lot())


@every_kind
@pytest.mark.parametrize("frozen", [("weight_hh_l0", "bias_ih_l0"), ("weight", "bias")])
def test_frozen_parts(kind, frozen):
    model = Program(KINDS[kind](IN, WIDTH, batch_first=True), from_state(STATES["shared"])).double()
    for name, p in model.layer.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    agree(model, lot())


def test_windows_of_one_example_and_no_gradients_outside():
    """An example is a batch of windows to the layer, which also sees numbers without gradients."""

    def use(model, x):
        with torch.no_grad():
            shift = model.layer(x.flip(2))[0].mean((1, 2))
        windows = x.unfold(1, 2, 1).transpose(2, 3).flatten(0, 1)
        return model.layer(windows)[0].mean(1).unflatten(0, (len(x), -1)).sum(1) + shift[:, None]

    agree(Program(nn.GRU(IN, WIDTH, batch_first=True), use).double(), lot())


def test_each_example_draws_its_own_dropout_between_layers():
    """256 equal examples: with numbers of their own, two sums are alike; else they would not be."""
    model = Program(nn.GRU(IN, WIDTH, 2, dropout=0.5, batch_first=True), outputs).double()
    x, y = lot(1)
    batch = x.expand(256, -1, -1).contiguous(), y.expand(256).contiguous()
    torch.manual_seed(0)
    found = [clipped_sum(model, loss_fn, batch, Flat(1e3)) for _ in range(2)]
    first, second = (total.sums["layer.weight_ih_l1"] for total in found)
    assert 0 < (first - second).norm() < 0.3 * first.norm()


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_nonfinite_example_adds_nothing_and_moves_no_bit(kind, dtype):
    model = Program(KINDS[kind](IN, WIDTH, 2, batch_first=True), outputs).to(dtype)
    x, y = lot(dtype=dtype)
    weights = torch.ones(EXAMPLES)
    weights[2] = 0
    want = clipped_sum(model, loss_fn, (x, y), Flat(0.1), weights=weights)
    for bad in (float("nan"), float("inf")):
        x = x.clone()
        x[2, 1, 3] = bad
        for bounded in (False, True):
            found = clipped_sum(model, loss_fn, (x, y), Flat(0.1), bounded=bounded)
            if bounded:
                assert all(s.isfinite().all() for s in found.sums.values())
            else:
                assert all(torch.equal(found.sums[n], s) for n, s in want.sums.items())


@every_kind
@pytest.mark.parametrize("library", ["onednn", "torch"])
def test_float32_by_either_library(kind, library, monkeypatch):
    monkeypatch.setattr(torch_internals, "FEW", 0)
    monkeypatch.setattr(torch_internals, "_onednn_is_faster", lambda: library == "onednn")
    torch.manual_seed(0)
    model = Program(KINDS[kind](IN, WIDTH, 2, batch_first=True, bidirectional=True), outputs, 12)
    x, y = lot(dtype=torch.float32)
    found = clipped_sum(model, loss_fn, (x, y), Flat(1e3)).sums
    want = alone(model.double(), loss_fn, (x.double(), y), Flat(1e3)).sums
    for name, value in want.items():
        assert (found[name] - value).norm() <= 1e-6 * value.norm() + 1e-8, name


@every_kind
def test_half_precision_and_autocast(kind):
    model = Program(KINDS[kind](IN, WIDTH, batch_first=True), outputs)
    x, y = lot(dtype=torch.float32)
    want = clipped_sum(model, loss_fn, (x, y), Flat(0.05)).sums

    def cast_loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(model, batch)

    low = clipped_sum(model, cast_loss, (x, y), Flat(0.05)).sums
    found = clipped_sum(model.bfloat16(), loss_fn, (x.bfloat16(), y), Flat(0.05))
    for name, value in want.items():
        for sums in (low, found.sums):
            assert (sums[name] - value).norm() <= 0.1 * value.norm() + 1e-4, name


@every_kind
def test_a_long_sequence_is_one_node_of_the_graph(kind):
    model = Program(KINDS[kind](IN, WIDTH, batch_first=True), outputs)
    batch = torch.zeros(1, 500, IN), torch.zeros(1, dtype=torch.long)
    programs = Programs(model, loss_fn)
    programs.prepare(batch)
    nodes = programs.program_of(batch).graph.graph.nodes
    assert sum(LAYER in node.args for node in nodes) == 1
    assert len(nodes) < 30


def test_a_layer_that_no_example_reaches():
    """Its output is a value that all examples share: computed from parameters only."""

    def use(model, x):
        return x.mean(1) @ model.layer(model.start.expand(1, IN, WIDTH))[0][0]

    for kind in KINDS:
        agree(Program(KINDS[kind](WIDTH, WIDTH, batch_first=True), use).double(), lot())


@pytest.mark.parametrize("projected", [False, True])
@every_kind
def test_what_the_compiler_is_shown_has_the_shapes_of_what_is_computed(kind, projected):
    name = kind if kind in ("lstm", "gru") else f"rnn_{kind}"
    has_cell, gates = kind == "lstm", {"lstm": 4, "gru": 3}.get(kind, 1) * WIDTH
    width = 3 if projected and has_cell else WIDTH

    def results():
        z, h, c = torch.zeros(STEPS, 2, gates), torch.zeros(2, width), torch.zeros(2, WIDTH)
        w_hh, w_hr = torch.zeros(gates, width), torch.zeros(width, WIDTH)
        c, w_hr = (c if has_cell else None), (w_hr if width != WIDTH else None)
        z, *kept = _forward_whole(name, False, z, h, c, w_hh, None, w_hr)
        dout = torch.zeros(2, STEPS, width).transpose(0, 1)
        found = _backward_whole(name, False, z, dout, c, kept, w_hh, w_hr)
        return [(t.shape, t.stride()) for t in (z, *kept, *found)]

    with FakeTensorMode():
        shown = results()
    assert shown == results()

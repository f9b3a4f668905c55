"""Graphs in the compiler's operations: equal to the program, without writes, blocks traced once."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tacit.training.gpu.decomposed import decomposed
from tacit.training.gpu.graph_pair import _compiler

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules


def decompose(function, *inputs):
    """Return the decomposed graph, or None, and how many operations were traced for it."""
    compiler = _compiler()
    if compiler is None:
        pytest.skip("this torch has another compiler")
    mode, traced = compiler.FakeTensorMode(), []
    with mode:
        fake = [mode.from_tensor(tensor, static_shapes=True) for tensor in inputs]
        raw = compiler.make_fx(function)(*fake)

    table = compiler.select_decomp_table()

    def trace(part, *values):
        traced.append(part)
        with mode, torch.no_grad():
            return compiler.make_fx(part, decomposition_table=table)(*values)

    return decomposed(raw, trace, table, mode), len(traced)


def blocks(depth: int):
    def run(x: Tensor, w: Tensor) -> list[Tensor]:
        for _ in range(depth):
            x = F.gelu(F.layer_norm(x, x.shape[-1:]) @ w, approximate="tanh") + x
            x, rest = x.mul_(0.5).add_(x.roll(1, 0)), x.var(0)
        return [x, rest]

    return run


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_repeated_blocks_are_traced_once(depth):
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    graph, traced = decompose(blocks(depth), x, w)
    assert graph is not None
    for ours, theirs in zip(graph(x, w), blocks(depth)(x, w), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert traced <= 40
    if depth > 1:  # the first block may read an input, the others do not
        assert traced <= decompose(blocks(2), x, w)[1]


def in_a_row(x):
    y = x * 2
    y.add_(1).mul_(3)
    y.relu_()
    return [y, y.sum()]


def read_before(x):
    y = x * 2
    z = y.exp()
    y.add_(1)
    return [z * y]


def view_made_after(x):
    y = x * 2
    y.add_(1)
    return [y[0], y.t()]


def view_used_before(x):
    y = x * 2
    total = y[0].sum()
    y.add_(1)
    return [y + total]


def into_a_view_alone(x):
    y = (x * 2)[1:]
    y.add_(1)
    return [y]


def base_of_a_view(x):
    y = x * 2
    y[0].add_(1)
    return [y.sum()]


def view_of_a_base(x):
    y = x * 2
    view = y.t()[1]
    y.add_(1)
    return [view]


def slice_assigned(x):
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1].cumsum(1)
    return [y]


def into_an_input(x):
    x.add_(1)
    return [x * 2]


def into_a_view_of_an_input(x):
    x.view(-1).mul_(2)
    return [x + 1]


def narrower_than_the_result(x):
    y = x * 2
    y.add_(x.double())
    return [y]


def by_an_argument_out(x):
    y = torch.empty_like(x)
    torch.add(x, 1, out=y)
    return [y]


def copied(x):
    y = torch.empty(3, 4, dtype=torch.float64)
    y.copy_(x)
    return [y.t() @ y]


def several_results(x):
    first, second = (x * 2).split(2, 1)
    values, places = first.max(1)
    return [values + second.sum(1), places]


SIMPLE = [in_a_row, read_before, view_made_after, view_used_before, copied, several_results]
OTHERS = [
    into_a_view_alone, base_of_a_view, view_of_a_base, slice_assigned, into_an_input,
    into_a_view_of_an_input, narrower_than_the_result, by_an_argument_out,
]  # fmt: skip


@pytest.mark.parametrize("function", [*SIMPLE, *OTHERS], ids=lambda f: f.__name__)
def test_a_graph_without_writes_gives_the_same_or_there_is_none(function):
    x = torch.randn(3, 4)
    graph, _ = decompose(function, x)
    if graph is None:
        assert function in OTHERS
        return
    targets = [n.target for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    assert not any(target._schema.is_mutable for target in targets)
    before = x.clone()
    found = graph(x)
    assert torch.equal(x, before)
    for ours, theirs in zip(found, function(before), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)

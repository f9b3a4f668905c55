"""Products, lookups and derived weights: the sums of a loop, and which of them are copied."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tacit.training import Flat, record_loop
from tacit.training.examples import Examples
from tacit.training.program import mapped
from tacit.training.rules.factored import Outer, Parts, Region, TableRows

EXAMPLES = 6


class Function(nn.Module):
    def __init__(self, function, *shapes):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.weights = nn.ParameterList([torch.randn(*shape) for shape in shapes])

    def forward(self, x):
        return self.function(x, *self.weights)


def product(equation):
    return lambda x, *weights: torch.einsum(equation, x, *weights)


def looked_up(x, table):
    ids = (x > 0).long().sum(-1)  # (examples, 4)
    return table[ids - 5] + torch.index_select(table, 0, ids[0]).sum()


def without_gradient(x, w):
    with torch.no_grad():
        fixed = w.t() * 2
    return x @ fixed + (x @ w.t().detach()) + x @ w.t()


# x has the shape (examples, 4, 5).
FACTORED = {
    "ellipsis": (product("...i,io"), (5, 3)),
    "ellipsis and output": (product("b...i,oi->b...o"), (3, 5)),
    "two weights": (product("bti,ir,ro->bto"), (5, 2), (2, 3)),
    "a matrix for each token": (product("bti,tio->bto"), (4, 5, 3)),
    "matrices not side by side": (product("bti,ito->bto"), (5, 4, 3)),
    "heads": (product("btj,hij->bthi"), (2, 3, 5)),
    "used twice": (
        lambda x, w: (
            torch.einsum("bti,io->bto", x, w)
            + torch.einsum("bto,oi->bti", x[..., :3], w.T)[..., :3]
        ),
        (5, 3),
    ),
    "tokens": (lambda x, w: w @ x, (4, 4)),
    "stack of matrices": (lambda x, w: x.unsqueeze(1) @ w, (3, 5, 2)),
    "stack of one": (lambda x, w: x.unsqueeze(1) @ w, (1, 5, 2)),
    "vector": (lambda x, w: x @ w, (5,)),
    "bmm": (lambda x, w: torch.bmm(x.transpose(0, 1), w).transpose(0, 1), (4, 5, 3)),
    "tensordot": (lambda x, w: torch.tensordot(x, w, dims=([1, 2], [1, 0])), (5, 4, 3)),
    "inner": (torch.inner, (3, 5)),
    "bilinear": (lambda x, w, b: F.bilinear(x, x[..., :2].contiguous(), w, b), (3, 5, 2), (3,)),
    "table": (looked_up, (6, 3)),
    "table of matrices": (lambda x, w: w[(x > 0).long().sum(-1)].flatten(2), (6, 2, 3)),
    "slices": (lambda x, w: x @ w[:5] + x @ w[5:], (10, 3)),
    "overlapping slices": (lambda x, w: x @ w[:5] + x @ w[1:6], (6, 3)),
    "transposed and reshaped": (lambda x, w: F.linear(x, w.T.reshape(4, 5)), (10, 2)),
    "chunks": (lambda x, w: sum(F.linear(x, c, b[:2]) for c, b in zip(w.chunk(2), (w[0], w[1]),
               strict=True)), (4, 5)),
    "scaled, added, shared": (lambda x, w: x @ (2 * w - 1 / 3 + w / 4), (5, 3)),
    "low rank": (lambda x, a, b: x @ (a @ b).to(x.dtype), (5, 2), (2, 3)),
    "positions": (lambda x, w: x + w[:4] + F.embedding(torch.arange(4), w), (9, 5)),
    "without gradient": (without_gradient, (3, 5)),
}  # fmt: skip
COPIED = {
    "sum of a weight's axis": (product("bti,io->bt"), (5, 3)),
    "diagonal": (product("bti,ii->bti"), (5, 5)),
    "many matrices": (product("bti,tio->bto"), (4, 5, 3)),
}


@pytest.mark.parametrize("name", [*FACTORED, *COPIED])
def test_sums_equal_those_of_a_loop(name, monkeypatch):
    function, *shapes = (FACTORED | COPIED)[name]
    if name == "many matrices":
        monkeypatch.setattr("tacit.training.rules.products.BLOCKS", 3)
    model = Function(function, *shapes).double()
    x = torch.randn(EXAMPLES, 4, 5, dtype=torch.float64)
    mask = torch.ones(EXAMPLES, dtype=torch.bool)
    examples = Examples(model, lambda m, b: m(b[0]).square().flatten(1).sum(1), (x,), mask)
    copied, copy = [], mapped.MappedTape.copy
    monkeypatch.setattr(mapped.MappedTape, "copy", lambda *args: copied.append(1) or copy(*args))
    found, expected = (
        mapped.run(examples, Flat(0.5)).sums,
        record_loop.run(examples, Flat(0.5)).sums,
    )
    for key, value in expected.items():
        assert torch.allclose(found[key], value, rtol=1e-10, atol=1e-13)
    assert bool(copied) == (name in COPIED)


def test_parts_stay_factored_unless_they_overlap():
    whole = Region((8, 3), (3, 1), 0, (8, 3))

    def part(start, stop):
        rows = stop - start
        outer = Outer(torch.randn(2, 7, rows), torch.randn(2, 7, 3))
        return Parts((Region((rows, 3), (3, 1), 3 * start, (rows, 3)),), (outer,), whole)

    apart = Parts.together([part(0, 3), part(3, 6), part(0, 3)])
    assert apart is not None
    assert [type(g) for g in apart.gradients] == [Outer, Outer]
    dense, factors = apart.dense(), torch.tensor([0.5, 2.0])
    assert torch.allclose(apart.settle(bounded=False)[0], dense.flatten(1).square().sum(1))
    total = apart.weighted_sum(factors, None)
    assert torch.allclose(total, (factors.view(-1, 1, 1) * dense).sum(0), atol=1e-5)
    assert Parts.together([part(0, 3), part(2, 6)]) is None


def test_a_lookup_of_positions_does_not_form_the_table(monkeypatch):
    seen = []
    settle = mapped.MappedTape._settle
    monkeypatch.setattr(
        mapped.MappedTape, "_settle", lambda t, n, g: seen.append(type(g)) or settle(t, n, g)
    )
    model = Function(lambda x, w: x + F.embedding(torch.arange(4), w), (1000, 5))
    mask = torch.ones(EXAMPLES, dtype=torch.bool)
    examples = Examples(
        model, lambda m, b: m(b[0]).sum((1, 2)), (torch.randn(EXAMPLES, 4, 5),), mask
    )
    mapped.run(examples, Flat(1.0))
    assert seen == [TableRows]

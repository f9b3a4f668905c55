"""Products of examples with shared tensors of any shape: einsum, stacked matrices, bilinear.

Each becomes products of a matrix of the shared tensor with the rows of an example, by the rule of
linear layers. The gradients of such a matrix are a part of those of the tensor.
"""

from collections.abc import Sequence
from itertools import product
from math import prod
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from tacit.training.rules import layers
from tacit.training.rules.factored import FactoredGradient, Parts, Region
from tacit.training.rules.operands import Declined

aten = torch.ops.aten
# Their shared tensors may be used as several matrices, whose gradients are joined.
OF_SEVERAL = {aten.einsum.default, aten.matmul.default, aten.bmm.default, aten.tensordot.default}
BLOCKS = 16  # most matrices of a shared tensor that are multiplied one by one


def einsum(tape: Any, equation: str, operands: Sequence[Tensor], **_: Any) -> Tensor:
    """Compute `torch.einsum` of stacked and shared tensors; without a tape, of stacked ones."""
    is_shared = [tape is not None and tape.is_shared(t) for t in operands]
    ranks = [t.dim() - (not shared) for t, shared in zip(operands, is_shared, strict=True)]
    terms, out = _letters(equation, ranks)
    pairs = list(zip(operands, terms, strict=True))
    shared = [pair for pair, is_of in zip(pairs, is_shared, strict=True) if is_of]
    others = [pair for pair, is_of in zip(pairs, is_shared, strict=True) if not is_of]
    if any(len({*term}) < len(term) for term in terms):
        raise Declined
    needed = {*out}.union(*(term for _, term in shared))
    have = "".join(dict.fromkeys(a for _, term in others for a in term if a in needed))
    row = next(a for a in reversed(ascii_letters) if a not in {*out}.union(*terms))  # of examples
    left = ",".join(row + term for _, term in others)
    x = torch.einsum(f"{left}->{row}{have}", *(t for t, _ in others))
    for i, (weight, term) in enumerate(shared):
        needed = {*out}.union(*(later for _, later in shared[i + 1 :]))
        x, have = _contract(tape, x, have, weight, term, needed)
    return x.permute([0, *(1 + have.index(a) for a in out)])


def _letters(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Return the letters of each operand's axes, and of the result's."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    free = [a for a in reversed(ascii_letters) if a not in equation]
    rests = [n - len(term.replace("...", "")) for n, term in zip(ranks, terms, strict=True)]
    wide = max(rests)  # axes of an ellipsis, which are counted from the last
    for i, rest in enumerate(rests):
        terms[i] = terms[i].replace("...", "".join(free[wide - rest : wide]))
    if not arrow:
        once = sorted(
            a for a in {*"".join(terms)} if "".join(terms).count(a) == 1 and a not in free
        )
        out = ("..." if "..." in left else "") + "".join(once)
    return terms, out.replace("...", "".join(free[:wide]))


def _contract(
    tape: Any, x: Tensor, have: str, weight: Tensor, term: str, needed: set[str]
) -> tuple[Tensor, str]:
    """Return the product of x and a shared tensor, summed over letters that are not needed."""
    sizes = dict(zip(term, weight.shape, strict=True)) | dict(zip(have, x.shape[1:], strict=True))
    if any(sizes[a] != n for a, n in zip(term, weight.shape, strict=True)):
        raise Declined  # broadcast
    of_both = [a for a in term if a in have and a in needed]
    summed = [a for a in term if a in have and a not in needed]
    own = [a for a in term if a not in have]
    kept = [a for a in have if a not in term]
    if not (own or summed):
        raise Declined  # no sum: a scale
    if not {*own, *kept} <= needed or prod(sizes[a] for a in of_both) > BLOCKS:
        raise Declined
    rows = x.permute([0, *(1 + have.index(a) for a in (*of_both, *kept, *summed))])
    counts = [prod(sizes[a] for a in letters) for letters in (of_both, kept, summed)]
    order = [term.index(a) for a in (*of_both, *own, *summed)]
    found = _products(
        tape, rows.reshape(x.shape[0], *counts), weight, order, len(of_both), len(own)
    )
    letters = [*of_both, *kept, *own]
    return found.reshape([x.shape[0], *(sizes[a] for a in letters)]), "".join(letters)


def _products(
    tape: Any, rows: Tensor, weight: Tensor, order: list[int], outer: int, own: int
) -> Tensor:
    """Return rows (examples, N, T, K) times the N matrices (P, K) of a shared tensor.

    With its axes in `order`, the first `outer` count the matrices, and the next `own` give P.
    """
    view = weight.permute(order)
    height = prod(view.shape[outer : outer + own])
    found = []
    for i, index in enumerate(product(*map(range, view.shape[:outer]))):
        part = view[index]
        matrix = part.reshape(height, rows.shape[3])
        found.append(layers.linear(PartOf(tape, weight, part, matrix), rows[:, i], matrix))
    return torch.stack(found, 1)


class PartOf:
    """A tape for which `value` is shared: the numbers of `part`, a view of a shared tensor."""

    def __init__(self, tape: Any, shared: Tensor, part: Tensor, value: Tensor) -> None:
        start = int(part.storage_offset() - shared.storage_offset())
        self.region = Region(tuple(part.shape), part.stride(), start, tuple(value.shape))
        self.whole = Region(tuple(shared.shape), shared.stride(), 0, tuple(shared.shape))
        if self.whole.stop != shared.numel():
            raise Declined  # its numbers are not adjacent
        self.tape, self.shared, self.value = tape, shared, value
        self.site, self.plain, self.is_small = tape.site, tape.plain, tape.is_small

    def is_shared(self, tensor: Tensor | None) -> bool:
        """Return whether the tensor is the part."""
        return tensor is self.value

    def add(self, _: Tensor, gradient: FactoredGradient) -> None:
        """Add the gradients of the part to those of the whole."""
        if self.region != self.whole:
            gradient = Parts((self.region,), (gradient,), self.whole)
        self.tape.add(self.shared, gradient)


def matmul(tape: Any, a: Tensor, b: Tensor) -> Tensor:
    """Compute `a @ b`, where one has more than two axes or the first is shared."""
    if tape.is_shared(b) and b.dim() == 2:
        raise Declined  # this case has a rule
    ranks = [t.dim() - (not tape.is_shared(t)) for t in (a, b)]
    wide = max(*ranks, 2) - 2
    operands, terms = [], []
    ends = "YZ" if ranks[0] > 1 else "Z", "ZX"[: ranks[1]]
    for own, rank, other, last in zip((a, b), ranks, ranks[::-1], ends, strict=True):
        batch = list(range(wide - rank + 2, wide))
        if not tape.is_shared(own):  # an axis of length 1 is not needed where the other has it
            single = [i for i in batch if own.shape[i - wide - 2] == 1 and i >= wide - other + 2]
            own = own.squeeze([i - wide - 2 for i in single])
            batch = [i for i in batch if i not in single]
        operands.append(own)
        terms.append("".join(ascii_letters[i] for i in batch) + last)
    out = ascii_letters[:wide] + "Y" * (ranks[0] > 1) + "X" * (ranks[1] > 1)
    return einsum(tape, f"{terms[0]},{terms[1]}->{out}", operands)


def tensordot(tape: Any, a: Tensor, b: Tensor, of_a: list[int], of_b: list[int]) -> Tensor:
    """Compute `torch.tensordot`."""
    ranks = [t.dim() - (not tape.is_shared(t)) for t in (a, b)]
    left, right = list(ascii_letters[: ranks[0]]), list(ascii_letters[26 : 26 + ranks[1]])
    for i, j in zip(of_a, of_b, strict=True):
        right[j] = left[i]
    out = [x for x in left if x not in right] + [x for x in right if x not in left]
    return einsum(tape, "".join((*left, ",", *right, "->", *out)), (a, b))


def inner(tape: Any, a: Tensor, b: Tensor) -> Tensor:
    """Compute `torch.inner`."""
    return tensordot(tape, a, b, [-1], [-1])


def bilinear(tape: Any, a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.bilinear`."""
    found = einsum(tape, "...i,...j,oij->...o", (a, b, weight))
    if bias is None:
        return found
    return layers.add(tape, found, bias) if tape.is_shared(bias) else found + bias

"""The operators of one example's program, rewritten for all examples at once: `lifted`.

A *stacked* tensor holds that of every example, on a new first axis. When a program is traced, each
operator of an example becomes one on stacked tensors, so that a step runs plain operators of torch.
No example can reach another, because each of them is one of these:

- an operator that computes each number alone; its operands are aligned behind the first axis;
- an operator along axes that are named in its arguments: the first axis is none of them;
- a kernel that takes a batch, and computes each entry of it alone: the first axis is in the batch;
- any other operator: `torch.func.vmap` maps it over the first axis (`MappedTape.map`);
- a site, an operator with parameters, which a rule of `layers` computes (`MappedTape.meet`).

Which of them it is follows from the graph, before any record is seen: from the operator, and from
the ranks and types of its operands. Every rule gives a stacked tensor, since an operand that
decides the result's shape is stacked. What reads memory by its address (`as_strided`) or writes
where its schema does not say so (running statistics) has no rule: `one_example` refuses it. In a
program that writes into tensors, no kernel changes the order of memory, so that views remain views.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.nn import functional as F

from tacit.training.rules import products
from tacit.training.rules.operands import channels_last
from tacit.training.torch_internals import schema_of

aten = torch.ops.aten
# They compute each number alone, and are not tagged so by torch.
_ELEMENTWISE = {
    aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.alias.default,
    aten.contiguous.default, aten.detach.default, aten.dropout.default, aten.dropout_.default,
    aten.__and__.Tensor, aten.__or__.Tensor, aten.where.ScalarOther, aten.where.ScalarSelf,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.copy_.default,
    aten.masked_fill_.Scalar, aten.log_sigmoid.default, aten.hardswish.default,
}  # fmt: skip
# They work along the axes in their arguments of these names; the other axes are loops around that.
_AXES = ("dim", "dims", "dim0", "dim1", "start_dim", "end_dim")
_REDUCED = {
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.var.correction,
    aten.std.correction, aten.var.dim, aten.std.dim, aten.linalg_vector_norm.default,
}  # over all axes, if none is given  # fmt: skip
_ALONG = {
    *_REDUCED, aten.softmax.int, aten.log_softmax.int, aten.cumsum.default, aten.logsumexp.default,
    aten.topk.default, aten.sort.default, aten.argsort.default, aten.argmax.default,
    aten.argmin.default,
    aten.gather.default, aten.scatter.src, aten.scatter_add.default, aten.index_select.default,
    aten.cat.default, aten.stack.default, aten.split.Tensor, aten.split_with_sizes.default,
    aten.chunk.default, aten.unbind.int, aten.select.int, aten.slice.Tensor, aten.narrow.default,
    aten.transpose.int, aten.permute.default, aten.flatten.using_ints, aten.unflatten.int,
    aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.glu.default,
    aten.flip.default, aten.repeat_interleave.self_int, aten.all.dim, aten.any.dim, aten.max.dim,
    aten.min.dim, aten.cosine_similarity.default, aten.roll.default,
}  # fmt: skip
_MORE_AXES = {aten.unsqueeze.default, aten.stack.default}  # in the result, which axes count
_PRODUCTS = {aten.matmul.default, aten.bmm.default, aten.mm.default}
_WHOLE = {aten.sum.default: aten.sum.dim_IntList, aten.mean.default: aten.mean.dim}
_SIZED = {
    aten.view.default, aten.reshape.default, aten.expand.default, aten.broadcast_to.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
}  # fmt: skip
# The tensor at this place may have any axes in front.
_IN_FRONT = {
    aten.linear.default: 0, aten.embedding.default: 1, aten.layer_norm.default: 0,
    aten.rms_norm.default: 0, aten.pad.default: 0, aten.mT.default: 0,
}  # fmt: skip


def lifted(
    node: fx.Node, is_example: Callable[[fx.Node], bool], count: fx.Node, *, writes: bool
) -> fx.Node | None:
    """Return the node for all examples, in front of the node for one; None if it has to be mapped.

    `is_example` says of the inputs whether they are stacked, and `count` is the number of examples.
    All positional arguments of the node are given. `writes` says that its graph writes into
    tensors, so that views must remain views.
    """
    with node.graph.inserting_before(node):
        return _Lift(node, is_example, count, writes).lifted()


class _Lift:
    """One node. `meta` describes its inputs as one example has them."""

    def __init__(
        self, node: fx.Node, is_example: Callable[[fx.Node], bool], count: fx.Node, writes: bool
    ) -> None:
        self.node: Any = node  # whose arguments have many types
        self.is_example, self.count, self.writes = is_example, count, writes
        self.values: list[Any] = [n.meta.get("val") for n in node.all_input_nodes]
        self.places = [
            i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and is_example(a)
        ]

    def lifted(self) -> fx.Node | None:
        node, target = self.node, self.node.target
        given = [*node.args, *node.kwargs.values()]
        formats = {a for a in given if isinstance(a, torch.memory_format)}
        is_laid_out = formats - {torch.contiguous_format, torch.preserve_format}
        if is_laid_out or not all(isinstance(value, Tensor) for value in self.values):
            return None
        if target in _KERNELS:
            kernel, is_usable = _KERNELS[target]
            if self.writes and kernel is _channels_last:
                kernel = _image  # where the order of memory changes, a view becomes a copy
            args = self.stacked() if kernel in _OF_STACKED else node.args
            return self.call(kernel, target, *args) if is_usable(self) else None
        if target in _PRODUCTS and all(value.dim() > 1 for value in self.values):
            return self.call(aten.matmul.default, *self.aligned(max(v.dim() for v in self.values)))
        if target in _ALONG:
            return self.along()
        if target is aten.type_as.default and 0 in self.places:  # the second gives its type alone
            return self.call(target, *node.args)
        if target in _WHOLE and self.values[0].dim():
            axes = list(range(1, self.values[0].dim() + 1))
            return self.call(_WHOLE[target], node.args[0], axes)
        if target in _SIZED:
            return self.sized()
        if target is aten.index.Tensor:
            return self.indexed()
        if target in _IN_FRONT:
            is_plain = target is not aten.pad.default or node.args[2] == "constant"
            return (
                self.call(target, *node.args)
                if is_plain and self.takes(_IN_FRONT[target])
                else None
            )
        return self.elementwise()

    def call(self, target: Any, *args: Any) -> fx.Node:
        return self.node.graph.call_function(target, args, dict(self.node.kwargs))

    def takes(self, *places: int) -> bool:
        """Return whether the arguments at these places, and no others, hold examples."""
        return self.places == [*places]

    def aligned(self, rank: int) -> tuple[Any, ...]:
        """Return the arguments, in which stacked tensors have `rank` axes behind the first."""

        def align(n: fx.Node) -> fx.Node:
            missing = rank - n.meta["val"].dim()
            if missing <= 0 or not self.is_example(n):
                return n
            return self.graph_call(aten.unflatten.int, n, 0, [self.count, *[1] * missing])

        return map_arg(self.node.args, align)

    def stacked(self) -> tuple[Any, ...]:
        """Return the arguments, with constants repeated for each example."""

        def stack(n: fx.Node) -> fx.Node:
            sizes = [self.count, *n.meta["val"].shape]
            return n if self.is_example(n) else self.graph_call(aten.expand.default, n, sizes)

        return map_arg(self.node.args, stack)

    def graph_call(self, target: Any, *args: Any) -> fx.Node:
        return self.node.graph.call_function(target, args)

    def elementwise(self) -> fx.Node | None:
        target, value = self.node.target, self.node.meta.get("val")
        if target not in _ELEMENTWISE and torch.Tag.pointwise not in getattr(target, "tags", ()):
            return None
        shapes = [of.shape for of in self.values]
        # A tensor of one number does not decide the type of a result, but a stack of them would.
        is_mixed = len({of.dtype for of in self.values}) > 1 and torch.Size() in shapes
        if is_mixed or not isinstance(value, Tensor):
            return None
        if value.shape != torch.broadcast_shapes(*shapes):
            return None
        return self.call(target, *self.aligned(value.dim()))

    def along(self) -> fx.Node | None:
        target, args = self.node.target, self.node.args
        ranks = {value.dim() for value in self.values}
        rank = max(ranks) + (target in _MORE_AXES)
        if target is aten.index_select.default:  # the same entries of every example
            is_usable = self.takes(0) and self.values[0].dim() > 0
        else:
            args, is_usable = self.stacked(), len(ranks) == 1
        if not is_usable or not rank:
            return None
        found = []
        for argument, value in zip(schema_of(target).arguments, args, strict=False):
            if argument.name not in _AXES:
                found.append(value)
            elif isinstance(value, int):
                found.append(value % rank + 1)
            elif value:
                axes = [axis % rank + 1 for axis in value]
                found.append([0, *axes] if target is aten.permute.default else axes)
            elif target in _REDUCED:
                found.append(list(range(1, rank + 1)))
            else:
                return None
        return self.call(target, *found)

    def indexed(self) -> fx.Node | None:
        x, indices = self.node.args
        places = [i for i, index in enumerate(indices) if index is not None]
        if self.takes(0) and not any(map(self.is_example, filter(None, indices))):
            if places == list(range(places[0], places[-1] + 1)):  # else their axes come first
                return self.call(aten.index.Tensor, x, [None, *indices])
        elif not self.is_example(x) and len(indices) == 1:
            return self.call(aten.index.Tensor, x, indices)
        return None

    def sized(self) -> fx.Node:
        target, size = self.node.target, self.node.args[1]
        is_grown = target in (aten.expand.default, aten.broadcast_to.default)
        x, _, *rest = self.aligned(len(size)) if is_grown else self.node.args
        if target is aten.view.default and not self.writes:
            target = aten.reshape.default  # all examples may lie in another order than one
        return self.call(target, x, [self.count, *size], *rest)


# Kernels that take a batch ------------------------------------------------------------------------


def _batch(target: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run an operator for which an example always has a batch of its own."""
    return target(x.flatten(0, 1), *args, **kwargs).unflatten(0, x.shape[:2])


def _channels_last(target: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run a kernel that is several times as fast with channels last on a processor.

    Maxima over 2 x 2 of 14 x 14 cells, 16 channels, 128 examples: 5.2 ms, else 0.8 and 0.8 for the
    order of the input. What follows keeps that order, so only the first such operator changes it.
    """
    if x.dim() == 5 and x.device.type == "cpu":
        x = channels_last(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    return _image(target, x, *args, **kwargs)


def _image(target: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run an operator on images, of which an example may have a batch of its own or not."""
    return _batch(target, x, *args, **kwargs) if x.dim() == 5 else target(x, *args, **kwargs)


def _convolution(target: Any, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run a convolution, for which an example may have a batch of its own or not."""
    if x.dim() > weight.dim():
        return _batch(target, x, weight, *args, **kwargs)
    return target(x, weight, *args, **kwargs)


def _cross_entropy(target: Any, x: Tensor, labels: Tensor, *args: Any) -> Tensor:
    """Compute the losses of all rows; an example may have a batch of its own or not."""
    if x.dim() == 2:
        return target(x, labels, *args)
    return target(x.flatten(0, 1), labels.flatten(0, 1), *args).unflatten(0, x.shape[:2])


def simpler_cross_entropy(
    graph: fx.Graph,
    x: fx.Node,
    labels: fx.Node,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> fx.Node | None:
    """Write a mean or sum over an example's own rows as that of the losses of its rows."""
    if (
        reduction == 0
        or weight is not None
        or label_smoothing
        or labels.meta["val"].is_floating_point()
    ):
        return None
    losses, rows = x.meta["val"], labels.meta["val"]
    own = x, labels, None, 0, ignore_index, 0.0
    each = _described(graph, aten.cross_entropy_loss.default, own, losses.new_empty(rows.shape))
    total = _described(graph, aten.sum.default, (each,), losses.new_empty(()))
    if reduction == 2:
        return total
    is_counted = _described(graph, aten.ne.Scalar, (labels, ignore_index), rows)
    counted = _described(graph, aten.sum.default, (is_counted,), rows.new_empty(()))
    return graph.call_function(aten.div.Tensor, (total, counted))


def _described(graph: fx.Graph, target: Any, args: tuple[Any, ...], value: Tensor) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = value
    return node


def without_empty(graph: fx.Graph, tensors: Sequence[fx.Node], axis: int = 0) -> fx.Node | None:
    """Leave out what `cat` ignores, such as an empty cache of keys."""
    kept = [t for t in tensors if t.meta["val"].shape != (0,)]
    if len(kept) in (0, len(tensors)):
        return None
    return graph.call_function(aten.cat.default, (kept, axis))


def _attention(
    target: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Attend, in the four axes (batch, heads, positions, features) that fast kernels take."""
    if query.dim() == 3:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        return _attention(target, query, key, value, mask, *args, **kwargs).squeeze(1)
    batch = torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value)))

    def joined(t: Tensor) -> Tensor:
        return t.expand(*batch, *t.shape[-3:]).flatten(0, -4)

    if mask is not None:
        inner = [1] * (query.dim() - mask.dim())
        mask = joined(mask.reshape(mask.shape[0], *inner, *mask.shape[1:]))
    found = target(joined(query), joined(key), joined(value), mask, *args, **kwargs)
    return found.unflatten(0, batch)


def _addmm(_: Any, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.t(), bias)


def _einsum(_: Any, equation: str, operands: Sequence[Tensor], __: Any = None) -> Tensor:
    return products.einsum(None, equation, operands)


def _takes(*places: int) -> Callable[[_Lift], bool]:
    return lambda lift: lift.takes(*places)


def _has_no_weights(lift: _Lift) -> bool:
    return lift.takes(0, 1) and lift.node.args[3] == 0  # a loss for each row


def _has_equal_ranks(lift: _Lift) -> bool:
    return len({lift.node.args[i].meta["val"].dim() for i in range(3)}) == 1


def _is_plain_sum(lift: _Lift) -> bool:
    return lift.takes(1) and not lift.node.kwargs


# Of an operator: the kernel, and whether it can be used.
_OF_STACKED = {_attention, _einsum}  # which take constants as tensors of all examples too
_KERNELS: dict[Any, tuple[Callable[..., Tensor], Callable[[_Lift], bool]]] = {
    aten.scaled_dot_product_attention.default: (_attention, _has_equal_ranks),
    aten.cross_entropy_loss.default: (_cross_entropy, _has_no_weights),
    aten.addmm.default: (_addmm, _is_plain_sum),
    aten.einsum.default: (_einsum, lambda _: True),
    **dict.fromkeys(
        (
            aten.max_pool2d.default, aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec,
        ),
        (_channels_last, _takes(0)),
    ),
    **dict.fromkeys(
        (aten.adaptive_avg_pool2d.default, aten.avg_pool2d.default), (_image, _takes(0))
    ),
    **dict.fromkeys(
        (aten.group_norm.default, aten.instance_norm.default), (_batch, _takes(0))
    ),
    **dict.fromkeys(
        (
            aten.conv1d.default, aten.conv1d.padding, aten.conv2d.default, aten.conv2d.padding,
            aten.conv3d.default, aten.conv3d.padding, aten.conv_transpose1d.default,
            aten.conv_transpose2d.input, aten.conv_transpose3d.input,
        ),
        (_convolution, _takes(0)),
    ),
}  # fmt: skip

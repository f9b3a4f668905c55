"""The same models in JAX, for JAX Privacy: plain functions of a tree of arrays.

`WORKLOADS[name]` gives (parameters, loss of a batch, batch): shapes as in `_models.py`.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any  # nested dicts and lists of arrays
rng = np.random.default_rng(0)


def array(*shape: int) -> jax.Array:
    scale = 1 / np.sqrt(max(1, np.prod(shape[:-1])))
    return jnp.asarray(rng.normal(0, scale, shape), jnp.float32)


def dense(inputs: int, outputs: int, *, bias: bool = True) -> Tree:
    return {"w": array(inputs, outputs)} | ({"b": jnp.zeros(outputs)} if bias else {})


def linear(p: Tree, x: jax.Array, dtype: Any = None) -> jax.Array:
    w = p["w"] if dtype is None else p["w"].astype(dtype)
    y = x.astype(w.dtype) @ w
    return y + p["b"].astype(w.dtype) if "b" in p else y


def conv(
    p: Tree, x: jax.Array, stride: int = 1, pad: Any = "VALID", dtype: Any = None
) -> jax.Array:
    w = p["w"] if dtype is None else p["w"].astype(dtype)
    y = jax.lax.conv_general_dilated(
        x.astype(w.dtype), w, (stride, stride), pad, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y + p["b"].astype(w.dtype) if "b" in p else y


def normalize(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    mean = x.mean(axes, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(x.var(axes, keepdims=True) + 1e-5)


def group_norm(p: Tree, x: jax.Array, groups: int = 16) -> jax.Array:
    n, h, w, c = x.shape
    y = normalize(x.astype(jnp.float32).reshape(n, h, w, groups, c // groups), (1, 2, 4))
    return y.reshape(x.shape) * p["w"] + p["b"]


def layer_norm(p: Tree, x: jax.Array) -> jax.Array:
    return normalize(x.astype(jnp.float32), (-1,)) * p["w"] + p["b"]


def affine(width: int) -> Tree:
    return {"w": jnp.ones(width), "b": jnp.zeros(width)}


def class_loss(logits: jax.Array, y: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(logp, y[..., None], -1).mean()


def max_pool(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")


def cnn_parameters() -> Tree:
    return {
        "c1": {"w": array(8, 8, 1, 16), "b": jnp.zeros(16)},
        "c2": {"w": array(4, 4, 16, 32), "b": jnp.zeros(32)},
        "d1": dense(512, 32),
        "d2": dense(32, 10),
    }


def cnn(p: Tree, x: jax.Array) -> jax.Array:
    x = max_pool(jax.nn.relu(conv(p["c1"], x, 2, ((3, 3), (3, 3)))))
    x = max_pool(jax.nn.relu(conv(p["c2"], x, 2)))
    return linear(p["d2"], jax.nn.relu(linear(p["d1"], x.reshape(len(x), -1))))


def wrn_parameters() -> Tree:
    widths = [16, 64, 128, 256]
    blocks = []
    for a, b in itertools.pairwise(widths):
        for i, o in ((a, b), (b, b)):
            block = {"n1": affine(i), "c1": {"w": array(3, 3, i, o)}, "n2": affine(o)}
            block["c2"] = {"w": array(3, 3, o, o)}
            blocks.append(block | ({"short": {"w": array(1, 1, i, o)}} if i != o else {}))
    return {
        "stem": {"w": array(3, 3, 3, 16), "b": jnp.zeros(16)},
        "blocks": blocks,
        "norm": affine(256),
        "out": dense(256, 10),
    }


def wrn(p: Tree, x: jax.Array) -> jax.Array:
    half, same = jnp.bfloat16, ((1, 1), (1, 1))
    x = conv(p["stem"], x, 1, same, half)
    for i, block in enumerate(p["blocks"]):
        stride = 2 if i in (2, 4) else 1
        y = jax.nn.relu(group_norm(block["n1"], x)).astype(half)
        skip = conv(block["short"], y, stride, "VALID", half) if "short" in block else x
        z = conv(block["c1"], y, stride, same, half)
        z = jax.nn.relu(group_norm(block["n2"], z)).astype(half)
        x = skip + conv(block["c2"], z, 1, same, half)
    x = jax.nn.relu(group_norm(p["norm"], x)).mean((1, 2))
    return linear(p["out"], x, half)


def gpt_parameters() -> Tree:
    d = 768
    block = lambda: {  # noqa: E731
        "n1": affine(d), "n2": affine(d), "qkv": dense(d, 3 * d), "proj": dense(d, d),
        "up": dense(d, 4 * d), "down": dense(4 * d, d),
    }  # fmt: skip
    return {
        "tokens": array(50_304, d), "positions": array(512, d),
        "blocks": [block() for _ in range(12)], "norm": affine(d),
        "head": dense(d, 50_304, bias=False),
    }  # fmt: skip


def gpt(p: Tree, ids: jax.Array) -> jax.Array:
    half = jnp.bfloat16
    n, t = ids.shape
    x = p["tokens"][ids] + p["positions"][:t]
    for block in p["blocks"]:
        h = linear(block["qkv"], layer_norm(block["n1"], x), half)
        q, k, v = jnp.moveaxis(h.reshape(n, t, 3, 12, 64), 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(n, t, 768)
        x = x + linear(block["proj"], mixed, half)
        h = jax.nn.gelu(linear(block["up"], layer_norm(block["n2"], x), half))
        x = x + linear(block["down"], h, half)
    return linear(p["head"], layer_norm(p["norm"], x), half)


def lstm_parameters() -> Tree:
    return {"embed": array(10_000, 128), "gates": dense(256, 512), "out": dense(128, 2)}


def lstm(p: Tree, ids: jax.Array) -> jax.Array:
    x = p["embed"][ids].swapaxes(0, 1)  # (time, batch, features)

    def cell(state: tuple, now: jax.Array) -> tuple:
        h, c = state
        i, f, g, o = jnp.split(linear(p["gates"], jnp.concatenate([now, h], 1)), 4, 1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), None

    zero = jnp.zeros((ids.shape[0], 128))
    (h, _), _ = jax.lax.scan(cell, (zero, zero), x)
    return linear(p["out"], h)


def logistic_loss(p: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
    z = linear(p, x)[:, 0]
    return (jax.nn.softplus(z) - y * z).mean()


def classify(model: Callable) -> Callable:
    return lambda p, x, y: class_loss(model(p, x), y)


def mlp(p: Tree, x: jax.Array) -> jax.Array:
    return linear(p["d2"], jax.nn.relu(linear(p["d1"], x.reshape(len(x), -1))))


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def whole(high: int, *shape: int) -> jax.Array:
    return jnp.asarray(rng.integers(0, high, shape))


WORKLOADS: dict[str, tuple[Callable[[], Tree], Callable, Callable[[int], tuple]]] = {
    "logistic": (
        lambda: dense(11, 1),
        logistic_loss,
        lambda n: (normal(n, 11), whole(2, n).astype(jnp.float32)),
    ),
    "mlp": (
        lambda: {"d1": dense(784, 1000), "d2": dense(1000, 10)},
        classify(mlp),
        lambda n: (normal(n, 28, 28, 1), whole(10, n)),
    ),
    "cnn-256": (
        cnn_parameters,
        classify(cnn),
        lambda n: (normal(n, 28, 28, 1), whole(10, n)),
    ),
    "lstm": (lstm_parameters, classify(lstm), lambda n: (whole(10_000, n, 64), whole(2, n))),
    "wrn-16-4": (
        wrn_parameters,
        classify(wrn),
        lambda n: (normal(n, 32, 32, 3), whole(10, n)),
    ),
    "gpt2": (
        gpt_parameters,
        classify(gpt),
        lambda n: (whole(50_304, n, 512), whole(50_304, n, 512)),
    ),
}
WORKLOADS["cnn-2048"] = WORKLOADS["cnn-256"]

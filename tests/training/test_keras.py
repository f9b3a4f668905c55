"""Keras 3 models on the torch backend are torch modules, and are trained as such."""

import os
import runpy
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

os.environ.setdefault("KERAS_BACKEND", "torch")  # before keras is imported
keras = pytest.importorskip("keras", reason="Keras is not installed: pip install keras")
if keras.config.backend() != "torch":
    pytest.skip("Keras uses another backend: set KERAS_BACKEND=torch", allow_module_level=True)

import tacit  # noqa: E402  # the backend comes first
from tacit.errors import IncompatibleModel  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of Keras and of slow engines
layers = keras.layers


def images(*more):
    return keras.Sequential([
        keras.Input((8, 8, 1)), layers.Conv2D(6, 3), *more, layers.Activation("relu"),
        layers.Flatten(), layers.Dense(3),
    ])  # fmt: skip


def texts(*middle):
    return keras.Sequential([keras.Input((7,)), layers.Embedding(20, 8), *middle, layers.Dense(3)])


def transformer():
    x = keras.Input((7,))
    h = layers.Embedding(20, 8)(x)
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 4)(h, h))
    return keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(h)))


MODELS = {
    "dense": lambda: keras.Sequential(
        [keras.Input((5,)), layers.Dense(8, "relu"), layers.Dense(3)]
    ),
    "convolution": lambda: images(),
    "group normalization": lambda: images(layers.GroupNormalization(2)),
    "dropout": lambda: images(layers.Dropout(0.3)),
    "lstm": lambda: texts(layers.LSTM(6)),
    "attention": transformer,
}


def private(model, *, steps=3, seed=None):
    torch.manual_seed(0)
    shape = model.input_shape[1:]
    x = torch.randint(0, 20, (60, *shape)) if shape == (7,) else torch.randn(60, *shape)
    return tacit.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), (x, torch.randint(0, 3, (60,))),
        lambda m, b: F.cross_entropy(m(b[0], training=True), b[1], reduction="none"),
        batch_size=16, steps=steps, clip_norm=1.0, noise_multiplier=1.0, seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_are_trained(name):
    for _ in range(2):
        model = MODELS[name]().to("cpu")
        run = private(model)
        before = [p.detach().clone() for p in model.parameters()]
        for lot in run:
            run.step(lot)
        assert run.isolation.startswith("tested, ")
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class Lots(keras.Sequential):
    """Trained by the loop of Keras, which fetches ahead: so its data are a number for each lot."""

    def train_step(self, _):
        next(self.lots)
        self.zero_grad()
        self.run.backward()
        self.run_optimizer.step()
        return {}


def test_the_loop_of_keras_takes_the_same_steps():
    ends = []
    for is_own in (True, False):
        keras.utils.set_random_seed(0)
        model = Lots([keras.Input((5,)), layers.Dense(8, "relu"), layers.Dense(3)]).to("cpu")
        run = model.run = private(model, seed=1)
        model.run_optimizer = run._optimizer
        if is_own:
            for lot in run:
                run.step(lot)
        else:
            model.lots = iter(run)
            model.compile(optimizer="sgd")  # unused
            model.fit(np.zeros((len(run), 1)), batch_size=1, epochs=1, verbose=0)
        assert run.steps_taken == 3
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


def test_batch_normalization_is_refused_by_name():
    model = images(layers.BatchNormalization(name="norm")).to("cpu")
    with pytest.raises(IncompatibleModel, match=r"^norm \(BatchNormalization\) mixes examples"):
        private(model)
    for layer in model.layers:
        layer.trainable = layer.name != "norm"  # it uses its moving statistics then
    run = private(model)
    for lot in run:
        run.step(lot)


@pytest.mark.slow
def test_the_example_runs():
    path = Path(__file__).parents[2] / "examples" / "keras_model.py"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accuracy = runpy.run_path(str(path))["main"](epochs=10)
    assert accuracy > 0.85

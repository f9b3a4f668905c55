"""A Keras 3 model on the torch backend, trained privately.

    pip install keras
    python examples/keras_model.py

On this backend a Keras model is a torch module: its variables are parameters, and `make_private`
takes it as it is. BatchNormalization mixes the examples of a batch and is refused; use
GroupNormalization or LayerNormalization.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

import keras
import torch
from torch.nn import functional as F

import tacit


def make_model() -> keras.Model:
    """Return a small convolutional classifier."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same"),
            keras.layers.GroupNormalization(4),
            keras.layers.Activation("relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def loss_fn(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return one loss for each example."""
    x, y = batch
    return F.cross_entropy(model(x, training=True), y, reduction="none")


def main(epochs: int = 10) -> float:
    """Train on scikit-learn's digits and return the accuracy on held-out records."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(-1)
    y = torch.tensor(digits.target)
    held_out = torch.arange(len(x)) % 5 == 0  # assumed public
    model = make_model().to("cpu")  # Keras would take a GPU by itself
    private = tacit.make_private(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        (x[~held_out], y[~held_out]),
        loss_fn,
        batch_size=128,
        epochs=epochs,
        clip_norm=1.0,
        epsilon=3.0,
        delta=1e-4,
    )
    for lot in private:
        private.step(lot)
    with torch.no_grad():
        right = model(x[held_out], training=False).argmax(1) == y[held_out]
    accuracy = float(right.float().mean())
    print(
        f"epsilon {private.epsilon(delta=1e-4):.2f}, accuracy {accuracy:.3f}, isolation: ", end=""
    )
    print(private.isolation)
    return accuracy


if __name__ == "__main__":
    main()

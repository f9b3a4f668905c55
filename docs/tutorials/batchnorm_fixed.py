# %% [markdown]
# # An image model with BatchNorm, fixed
#
# BatchNorm computes means over the batch, so every example influences the gradient of every other
# one. Such a model cannot be clipped example by example, and tacit refuses it by name.

# %%
import torch
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.errors import IncompatibleModel

data = tacit.datasets.load("digits")
x, y = torch.tensor(data.x_train).float()[:, None], torch.tensor(data.y_train)
torch.manual_seed(0)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def private_run(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    return tacit.make_private(
        model, optimizer, (x, y), loss_fn,
        batch_size=256, epochs=30, clip_norm=0.5, epsilon=8.0, delta=1e-4,
    )  # fmt: skip


try:
    private_run(network())
except IncompatibleModel as refused:
    print(refused)

# %% [markdown]
# `fix` replaces BatchNorm by GroupNorm, which looks at one example alone. Make the optimizer
# after it.

# %%
model = tacit.training.fix(network())
print([type(layer).__name__ for layer in model])

# %%
private = private_run(model)
for batch in private:
    private.step(batch)

x_test, y_test = torch.tensor(data.x_test).float()[:, None], torch.tensor(data.y_test)
with torch.no_grad():
    right = (model(x_test).argmax(1) == y_test).float().mean()
print(f"accuracy {right:.2f} at epsilon {private.epsilon(delta=1e-4):.1f}")

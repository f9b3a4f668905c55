# %% [markdown]
# # The image examples of Opacus, here
#
# `mnist.py`, `cifar10.py` and `imagenet.py` of Opacus (and its examples of ResNets and video) train
# different networks by one loop. So does this notebook. [The diffs](../opacus-examples.md) show
# which lines change. The pictures are drawn here, so that nothing has to be downloaded; replace
# `pictures` by your own tensors.

# %%
import torch
from torch import nn
from torch.nn import functional as F

import tacit

torch.manual_seed(0)


def pictures(n: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise with a bright half, and which half is bright: the left or the right one."""
    labels = torch.randint(0, 2, (n,))
    halves = torch.stack([torch.linspace(1, 0, shape[-1]), torch.linspace(0, 1, shape[-1])])
    bright = halves[labels].reshape(n, *([1] * (len(shape) - 1)), shape[-1])
    return bright + 0.5 * torch.randn(n, *shape), labels


def loss_fn(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def train(model, data, *, epochs=5):
    x, y = data
    private = tacit.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), (x[256:], y[256:]),
        loss_fn, batch_size=64, epochs=epochs, clip_norm=1.0, noise_multiplier=1.1,
    )  # fmt: skip
    for batch in private:
        private.step(batch)
    with torch.no_grad():
        right = (model(x[:256]).argmax(1) == y[:256]).float().mean()
    print(f"accuracy {right:.2f} at epsilon {private.epsilon(delta=1e-4):.2f}")


# %% [markdown]
# **mnist.py**: two convolutions and two linear layers, on 28 x 28 pixels.

# %%
mnist = nn.Sequential(
    nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
    nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
    nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 2),
)  # fmt: skip
train(mnist, pictures(1_256, 1, 28, 28))


# %% [markdown]
# **cifar10.py**: a stack of convolutions on 32 x 32 pixels in color. It has BatchNorm, which `fix`
# replaces; `ModuleValidator.fix` does that in Opacus.


# %%
def stage(before: int, after: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride, padding=1), nn.BatchNorm2d(after), nn.ReLU()
    )


cifar10 = nn.Sequential(
    stage(3, 16), nn.AvgPool2d(2), stage(16, 32), nn.AvgPool2d(2), stage(32, 32),
    nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 2),
)  # fmt: skip
train(tacit.training.fix(cifar10), pictures(1_256, 3, 32, 32))


# %% [markdown]
# **imagenet.py**: a residual network.


# %%
class Residual(nn.Module):
    def __init__(self, before: int, after: int):
        super().__init__()
        self.body = nn.Sequential(stage(before, after, 2), stage(after, after))
        self.short = nn.Conv2d(before, after, 1, 2)

    def forward(self, x):
        return F.relu(self.body(x) + self.short(x))


resnet = nn.Sequential(
    stage(3, 16, 2), Residual(16, 16), Residual(16, 32),
    nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 2),
)  # fmt: skip
train(tacit.training.fix(resnet), pictures(1_256, 3, 32, 32))

# %% [markdown]
# **Video**: convolutions over time and space, on clips of 4 pictures.

# %%
video = nn.Sequential(
    nn.Conv3d(1, 8, 3, stride=2, padding=1), nn.BatchNorm3d(8), nn.ReLU(),
    nn.AdaptiveAvgPool3d(2), nn.Flatten(), nn.Linear(64, 2),
)  # fmt: skip
train(tacit.training.fix(video), pictures(1_256, 1, 4, 16, 16))

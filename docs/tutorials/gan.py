# %% [markdown]
# # A GAN: two optimizers and a gradient penalty
#
# Only the critic sees private records, so only its steps are private. The generator learns from the
# critic, which is released: that is free.

# %%
import torch
from torch import nn
from torch.nn import functional as F

import tacit

torch.manual_seed(0)
angles = torch.rand(4_000) * 6.283
records = torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(4_000, 2)

generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3)
of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3)

# %% [markdown]
# The critic's slope at a point should have length 1 (Gulrajani et al. 2017, arXiv:1704.00028).
# The slope of these two layers is written out, so that all examples of a lot are computed together.
# `torch.autograd.grad(..., create_graph=True)` works for any critic, but one example at a time.


# %%
def slope(critic, points):
    first, _, last = critic
    gate = torch.where(first(points) > 0, 1.0, 0.2)
    return (gate * last.weight) @ first.weight


def loss_fn(critic, batch):
    """Return one loss for each real record, which is compared with one fake of its own."""
    (real,) = batch
    fake = generator(torch.randn(len(real), 4)).detach()
    between = torch.lerp(real, fake, torch.rand(len(real), 1))
    penalty = (slope(critic, between).norm(dim=1) - 1) ** 2
    return critic(fake).squeeze(1) - critic(real).squeeze(1) + 5 * penalty


private = tacit.make_private(
    critic, of_critic, records, loss_fn,
    batch_size=256, steps=300, clip_norm=1.0, epsilon=8.0, delta=1e-5,
)  # fmt: skip
for batch in private:
    private.step(batch)
    of_generator.zero_grad()
    loss = -critic(generator(torch.randn(256, 4))).mean()
    loss.backward()
    of_generator.step()

# %%
with torch.no_grad():
    made = generator(torch.randn(2_000, 4))
radius = made.norm(dim=1)
print(f"radius of what is made: {radius.mean():.2f} +- {radius.std():.2f} (records: 1.00 +- 0.05)")
print(f"epsilon {private.epsilon(delta=1e-5):.1f}")

# %% [markdown]
# **Images.** A generator and a discriminator of convolutions (DCGAN), as in Opacus's `dcgan.py`:
# the loss of the discriminator is that of one real and one fake picture. In a lot, `len(real)`
# counts its rows; the number of drawn records is private and is not used.

# %%
data = tacit.datasets.load("digits")
zeros = torch.tensor(data.x_train[data.y_train == 0]).float()[:, None] * 2 - 1

generator = nn.Sequential(
    nn.ConvTranspose2d(16, 32, 4), nn.GroupNorm(4, 32), nn.ReLU(),
    nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Tanh(),
)  # fmt: skip
discriminator = nn.Sequential(
    nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2),
    nn.Conv2d(16, 32, 4, 2, 1), nn.GroupNorm(4, 32), nn.LeakyReLU(0.2),
    nn.Flatten(), nn.Linear(128, 1),
)  # fmt: skip
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))


def loss_fn(discriminator, batch):
    (real,) = batch
    fake = generator(torch.randn(len(real), 16, 1, 1)).detach()
    return (F.softplus(-discriminator(real)) + F.softplus(discriminator(fake))).squeeze(1)


private = tacit.make_private(
    discriminator, of_discriminator, zeros, loss_fn,
    batch_size=64, steps=200, clip_norm=1.0, noise_multiplier=1.0,
)  # fmt: skip
for batch in private:
    private.step(batch)
    of_generator.zero_grad()
    loss = F.softplus(-discriminator(generator(torch.randn(64, 16, 1, 1)))).mean()
    loss.backward()
    of_generator.step()

# %%
with torch.no_grad():
    made = generator(torch.randn(3, 16, 1, 1)).squeeze(1)
for rows in zip(*made, strict=True):  # three pictures, side by side, in four shades
    print("   ".join("".join(" .o#"[int(1.999 + 1.999 * v)] * 2 for v in row) for row in rows))
print(f"epsilon {private.epsilon(delta=1e-4):.0f}: 178 records are few, so the noise is small")

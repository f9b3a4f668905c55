# %% [markdown]
# # A GAN: two optimizers and a gradient penalty
#
# Only the discriminator sees private records, so only its steps are private. The generator learns
# from the discriminator, which is released: that is free.

# %%
import torch
from torch import nn

import tacit

torch.manual_seed(0)
angles = torch.rand(4_000) * 6.283
records = torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(4_000, 2)

generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3)
of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3)


def loss_fn(critic, batch):
    """One loss for each real record: it is compared with one fake of its own."""
    (real,) = batch
    fake = generator(torch.randn(len(real), 4)).detach()
    between = torch.lerp(real, fake, torch.rand(len(real), 1)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1) ** 2
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

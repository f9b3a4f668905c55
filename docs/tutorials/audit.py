# %% [markdown]
# # Audit a run
#
# An audit attacks what was released. A lower bound on epsilon above the bill would prove a fault.

# %%
import torch
from torch.nn import functional as F

import tacit
from tacit.auditing import GradientCanaries, TrainingSetup, audit_training, noise_bound

torch.manual_seed(0)
x = torch.randn(2_000, 8)
y = (x[:, 0] > 0).long()


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


# %% [markdown]
# **Canaries.** Each is in the data or not by a fair coin, and has a coordinate of its own in every
# released gradient. How well can they be told apart?

# %%
canaries = GradientCanaries(1_000, clip_norm=1.0, rng=0)
model, records, loss = canaries.plant(torch.nn.Linear(8, 2), (x, y), loss_fn)
n = len(x) + 500
private = tacit.make_private(
    model, torch.optim.SGD(model.parameters(), lr=0.5), records, loss,
    batch_size=250, epochs=4, clip_norm=1.0, epsilon=4.0, delta=1e-5, n_records=n,
)  # fmt: skip
for lot in canaries.watch(private):
    private.step(lot)
bound = noise_bound(canaries.scores, canaries.is_member, private.event, delta=1e-5)
print(f"bill {private.epsilon(delta=1e-5):.2f}, attack proves at least {bound.epsilon_lower:.2f}")

# %% [markdown]
# **Tests of the mechanism.** Noise, draws, sensitivity, counts, keys and the bill, each compared
# with what was billed. Weights and buffers must follow from the releases alone.

# %%
setup = TrainingSetup(
    make_private=tacit.make_private,
    model=torch.nn.Linear(8, 2),
    dataset=(x[:200], y[:200]),
    loss_fn=loss_fn,
    settings={"batch_size": 40, "epochs": 5, "clip_norm": 1.0, "epsilon": 3.0, "delta": 1e-4},
)
found = audit_training(setup)
print("nothing found" if found.passes else [finding.name for finding in found.flagged])

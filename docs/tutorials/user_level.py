# %% [markdown]
# # People with many records
#
# A guarantee for one record says little about a person who has twenty of them. Here 600 people wear
# a watch that measured each of them 1 to 20 times; what is to be protected is a person.

# %%
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.accounting import group_epsilon
from tacit.training import Users, advise_sampling

torch.manual_seed(0)
rng = np.random.default_rng(0)
people = np.repeat(np.arange(600), rng.integers(1, 21, 600))  # whose record each one is
habit = rng.normal(size=(600, 6))[people]
x = torch.tensor(habit + rng.normal(size=(len(people), 6)), dtype=torch.float32)
y = (x[:, 0] + x[:, 1] - x[:, 2] > 0).long()
print(f"{len(people):,} records of 600 people")


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def trained(**settings):
    model = nn.Linear(6, 2)
    private = tacit.make_private(
        model, torch.optim.SGD(model.parameters(), lr=1.0), (x, y), loss_fn,
        clip_norm=1.0, epsilon=2.0, delta=1e-4, **settings,
    )  # fmt: skip
    for batch in private:
        private.step(batch)
    with torch.no_grad():
        right = (model(x).argmax(1) == y).float().mean()
    return private, float(right)


# %% [markdown]
# **Record by record.** Epsilon 2 for one record. What does it mean for a person with 20?

# %%
private, _ = trained(batch_size=600, epochs=10)
for records in (1, 5, 20):
    price = group_epsilon(private.event, records=records, delta=1e-4)
    print(f"epsilon {price:6.1f}, records of one person: {records}")

# %% [markdown]
# **Person by person.** A lot is now a sample of people. All gradients of a person are averaged and
# clipped once, so a person counts as one record did, and the batch size counts people.

# %%
watched = Users(ids=people, records_per_user=20)
private, right = trained(batch_size=60, epochs=10, users=watched)
print(
    f"epsilon {private.epsilon(delta=1e-4):.1f} for a {private.ledger.unit}, accuracy {right:.2f}"
)

# %% [markdown]
# **Which way to sample?** From public numbers alone: `advise_sampling` compares lots of people with
# lots of records.

# %%
advice = advise_sampling(
    n_users=600, n_records=6_000, records_per_user=20, rate=0.1, steps=100,
    epsilon=2.0, delta=1e-4,
)  # fmt: skip
print(
    f"lots of {advice.sampled}: noise {advice.noise_by_users:.3f} on the mean gradient; "
    f"lots of records: {advice.noise_by_records:.3f}"
)

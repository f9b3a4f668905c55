# %% [markdown]
# # Local against central
#
# Ten thousand people answer a question. Who has to be trusted, and what does it cost?

# %%
import numpy as np

from tacit import local
from tacit.summaries import histogram

rng = np.random.default_rng(0)
answers = rng.choice(4, 10_000, p=[0.5, 0.3, 0.15, 0.05])
truth = np.bincount(answers, minlength=4) / len(answers)
print(truth)

# %% [markdown]
# **Local**: noise on each device. Nobody sees a true answer.

# %%
oracle = local.choose_oracle(4, epsilon=1.0)
found = oracle.estimate(oracle.randomize(answers))
print(
    oracle.name,
    np.round(found.values, 3),
    f"largest error {np.abs(found.values - truth).max():.4f}",
)

# %% [markdown]
# **Central**: one trusted server adds noise to the result.

# %%
counts = histogram(answers, categories=[0, 1, 2, 3], epsilon=1.0)
shares = np.array([counts[str(option)].value for option in range(4)]) / len(answers)
print(np.round(shares, 4), f"largest error {np.abs(shares - truth).max():.4f}")

# %% [markdown]
# # Text with an LSTM
#
# Names of made-up places in two languages; which language is it? Records have different lengths:
# padding must not depend on the other records of a lot, so every name is padded to one length.

# %%
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import tacit

rng = np.random.default_rng(0)
SOUNDS = (("ka", "no", "shi", "ri", "mu", "ta"), ("berg", "dorf", "stein", "wald", "bach", "ober"))
LENGTH = 20


def name(language: int) -> str:
    return "".join(rng.choice(SOUNDS[language], rng.integers(2, 4)))[:LENGTH]


languages = rng.integers(0, 2, 4_000)
texts = [name(language) for language in languages]
letters = np.zeros((len(texts), LENGTH), dtype=np.int64)
for row, text in enumerate(texts):
    letters[row, : len(text)] = [ord(letter) - ord("a") + 1 for letter in text]
x, y = torch.from_numpy(letters), torch.from_numpy(languages)
print(texts[:4])

# %%
torch.manual_seed(0)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(27, 16)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.answer = nn.Linear(32, 2)

    def forward(self, x):
        states, _ = self.lstm(self.letters(x))
        return self.answer(states.mean(1))


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


model = Reader()
private = tacit.make_private(
    model, torch.optim.Adam(model.parameters(), lr=0.01), (x[:3_000], y[:3_000]), loss_fn,
    batch_size=300, epochs=6, clip_norm=1.0, epsilon=3.0, delta=1e-4,
)  # fmt: skip
for batch in private:
    private.step(batch)
with torch.no_grad():
    right = (model(x[3_000:]).argmax(1) == y[3_000:]).float().mean()
print(f"accuracy {right:.2f} at epsilon {private.epsilon(delta=1e-4):.1f}")

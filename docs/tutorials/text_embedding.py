# %% [markdown]
# # Sentiment of reviews, with an embedding
#
# The counterpart of Opacus's `imdb.py`: an embedding, a mean over the words, two linear layers.
# Reviews are made up here. For your own, put a file with the columns `text` and `label` (0 or 1)
# at the path named by `TACIT_REVIEWS`.
#
# Two things must not come from private records: the vocabulary, and the length of the padding.
# Words are therefore hashed into a fixed number of places, and all texts have one length.

# %%
import os
import zlib

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.nn import functional as F

import tacit

PLACES, LENGTH = 2_000, 40
REVIEWS = os.environ.get("TACIT_REVIEWS")
torch.manual_seed(0)
rng = np.random.default_rng(0)
GOOD = ["wonderful", "moving", "clever", "great", "charming"]
BAD = ["boring", "awful", "clumsy", "poor", "endless"]
PLAIN = ["the", "film", "actor", "scene", "story", "was", "and", "we", "saw", "end", "music", "it"]


def review(label: int) -> str:
    words = [*rng.choice(PLAIN, rng.integers(10, 30)), *rng.choice((BAD, GOOD)[label], 4)]
    return " ".join(rng.permutation(words))


if REVIEWS:
    table = pd.read_csv(REVIEWS)
else:
    made = rng.integers(0, 2, 5_000)
    table = pd.DataFrame({"text": [review(label) for label in made], "label": made})


def places(text: str) -> list[int]:
    """Return a place for each word, from 1 on, and 0 for padding."""
    found = [1 + zlib.crc32(word.encode()) % (PLACES - 1) for word in text.lower().split()]
    return (found + [0] * LENGTH)[:LENGTH]


x = torch.tensor([places(text) for text in table["text"]])
y = torch.tensor(table["label"].to_numpy())
print(table["text"][0][:60], "->", int(y[0]))


# %%
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(PLACES, 16, padding_idx=0)
        self.hidden, self.answer = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x):
        mean = self.words(x).sum(1) / (x != 0).sum(1, keepdim=True).clamp(min=1)
        return self.answer(F.relu(self.hidden(mean)))


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


model = Net()
n = len(x) * 4 // 5
private = tacit.make_private(
    model, torch.optim.Adam(model.parameters(), lr=0.02), (x[:n], y[:n]), loss_fn,
    batch_size=256, epochs=8, clip_norm=1.0, epsilon=4.0, delta=1e-5,
)  # fmt: skip
for batch in private:
    private.step(batch)
with torch.no_grad():
    right = (model(x[n:]).argmax(1) == y[n:]).float().mean()
print(f"accuracy {right:.2f} at epsilon {private.epsilon(delta=1e-5):.1f}")

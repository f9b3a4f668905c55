# %% [markdown]
# # Fine-tune a transformer with LoRA
#
# Noise falls on every trained weight, so train few of them. LoRA (Hu et al. 2021, arXiv:2106.09685)
# freezes a model and adds a product of two thin matrices to some of its layers.
#
# The model here is small and has random weights. To use a real one, install transformers and name
# the folder of its checkpoint: `TACIT_CHECKPOINT=models/distilbert jupyter lab`.

# %%
import os

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import tacit

CHECKPOINT = os.environ.get("TACIT_CHECKPOINT")  # a folder, or None for random weights
LENGTH = 12  # tokens of every text: padding must not depend on the other texts of a lot
torch.manual_seed(0)
rng = np.random.default_rng(0)
WORDS = {
    0: ["dull", "slow", "noisy", "broken", "late", "rude"],
    1: ["bright", "quick", "quiet", "solid", "early", "kind"],
}
OTHER = ["the", "a", "was", "staff", "room", "meal", "train", "it", "very", "and", "again", "there"]


def review(label: int) -> str:
    words = [*rng.choice(OTHER, 7), *rng.choice(WORDS[label], 2)]
    return " ".join(rng.permutation(words))


labels = rng.integers(0, 2, 4_000)
texts = [review(label) for label in labels]
print(texts[0], "->", labels[0])

# %% [markdown]
# **The model.** Its vocabulary is public: it comes with the checkpoint, never from the records.


# %%
class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self, width: int):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.dense = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        read = self.norm(x)
        scores = self.query(read) @ self.key(read).transpose(1, 2) / x.shape[-1] ** 0.5
        x = x + scores.softmax(-1) @ self.value(read)
        return x + self.dense(self.norm(x))


class Classifier(nn.Module):
    """A text classifier of two blocks."""

    def __init__(self, vocabulary: int, width: int = 64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.classifier = nn.Linear(width, 2)

    def forward(self, x):
        return self.classifier(self.blocks(self.embedding(x)).mean(1))


class Logits(nn.Module):
    """A classifier of transformers, with tokens in and logits out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(input_ids=x, attention_mask=(x != PADDING).long()).logits


if CHECKPOINT:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    PADDING = tokenizer.pad_token_id
    fixed = tokenizer(texts, padding="max_length", truncation=True, max_length=LENGTH)
    x = torch.tensor(fixed["input_ids"])
    model = Logits(AutoModelForSequenceClassification.from_pretrained(CHECKPOINT, num_labels=2))
else:
    vocabulary = ["", *OTHER, *WORDS[0], *WORDS[1]]
    x = torch.zeros(len(texts), LENGTH, dtype=torch.long)
    for row, text in enumerate(texts):
        tokens = [vocabulary.index(word) for word in text.split()]
        x[row, : len(tokens)] = torch.tensor(tokens)
    model = Classifier(len(vocabulary))
y = torch.from_numpy(labels)

# %% [markdown]
# **LoRA.** The correction starts at zero, so the first forward pass is that of the checkpoint.
# The two thin matrices are ordinary linear layers: tacit needs no rule of its own for them.


# %%
class LoRA(nn.Module):
    """A frozen linear layer plus a trained correction of low rank."""

    def __init__(self, frozen: nn.Linear, rank: int = 4, scale: float = 2.0):
        super().__init__()
        self.frozen, self.scale = frozen, scale
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.frozen(x) + self.scale * self.up(self.down(x))


ADAPTED = ("query", "value", "q_proj", "v_proj", "q_lin", "v_lin")  # the names of several families
TRAINED = ("down", "up", "classifier", "score")  # the corrections, and the new last layer

for name, layer in list(model.named_modules()):
    parent, _, own = name.rpartition(".")
    if own in ADAPTED:
        setattr(model.get_submodule(parent), own, LoRA(layer))
for name, weights in model.named_parameters():
    weights.requires_grad_(any(part in TRAINED for part in name.split(".")))

trained = [weights for weights in model.parameters() if weights.requires_grad]
count = sum(weights.numel() for weights in trained)
print(f"{count:,} of {sum(p.numel() for p in model.parameters()):,} weights are trained")

# %% [markdown]
# **Train.** The optimizer gets the trained weights; the frozen ones are neither clipped nor noised.
# `eval()` switches off dropout.


# %%
def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


model.eval()
private = tacit.make_private(
    model, torch.optim.Adam(trained, lr=0.01), (x[:3_000], y[:3_000]), loss_fn,
    batch_size=300, epochs=6, clip_norm=1.0, epsilon=3.0, delta=1e-4,
)  # fmt: skip
for batch in private:
    private.step(batch)
with torch.no_grad():
    right = (model(x[3_000:]).argmax(1) == y[3_000:]).float().mean()
print(f"accuracy {right:.2f} at epsilon {private.epsilon(delta=1e-4):.1f}")

# %% [markdown]
# **Release** the corrections alone: the rest is public already.

# %%
adapter = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
print(f"{len(adapter)} tensors, {4 * count / 1024:.0f} KiB")

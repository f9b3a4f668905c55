"""Train privately with a Hugging Face Trainer, by overriding three of its methods.

    pip install transformers accelerate
    python examples/trainer_loop.py

The private run is the train loader: each batch is one lot, each lot is one step, one pass is the
whole run. `run.backward()` computes the losses by `losses_of`. Losses and the sizes of lots are
private, but the Trainer logs the loss, and saves the number of operations, which follows from the
size of each batch; the overridden methods return zero for both. Gradients are already clipped, so
the Trainer's own clipping is off.
"""

import tempfile

import torch
import transformers
from torch.nn import functional as F

import tacit

DELTA = 1e-4


def losses_of(model, inputs):
    logits = model(input_ids=inputs["input_ids"]).logits
    return F.cross_entropy(logits, inputs["labels"], reduction="none")  # one loss per example


class PrivateTrainer(transformers.Trainer):
    def get_train_dataloader(self):
        return self.run

    def training_step(self, model, *_):
        model.train()
        self.run.backward()  # instead of: self.accelerator.backward(loss)
        return torch.zeros((), device=self.args.device)

    def floating_point_ops(self, _):
        return 0


torch.manual_seed(0)
y = torch.arange(3000) % 4
words = torch.randint(4, 16, (3000, 12))
words[:, ::3] = y[:, None]  # four words in twelve depend on the class
records = [{"input_ids": w, "labels": label} for w, label in zip(words, y, strict=True)]
config = transformers.BertConfig(vocab_size=16, num_labels=4, hidden_size=32, num_hidden_layers=1,
                                 num_attention_heads=2, intermediate_size=64)  # fmt: skip
model = transformers.BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with tempfile.TemporaryDirectory() as folder:
    arguments = transformers.TrainingArguments(folder, num_train_epochs=1, max_grad_norm=0.0)
    trainer = PrivateTrainer(model, arguments, optimizers=(optimizer, None))
    trainer.run = run = tacit.make_private(
        model, optimizer, records[:2000], losses_of, batch_size=200, epochs=5,
        clip_norm=1.0, epsilon=6.0, delta=DELTA,
    )  # fmt: skip
    trainer.train()
accuracy = (trainer.predict(records[2000:]).predictions.argmax(1) == y[2000:].numpy()).mean()
print(f"accuracy {accuracy:.3f}, epsilon {run.epsilon(delta=DELTA):.3f} at delta {DELTA:g}")

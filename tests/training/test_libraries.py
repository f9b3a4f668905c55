"""Lightning, the Hugging Face Trainer and Accelerate take the steps that `private.step` takes.

The real libraries, with what their users switch on. `test_foreign.py` makes the same calls without
them. Install: `pip install lightning transformers accelerate`.
"""

import logging

import pytest
import torch
from speed_options import with_speed
from torch import nn
from torch.nn import functional as F

from tacit.training import AdamBC, make_private

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own
OPTIONS = {"batch_size": 16, "steps": 6, "clip_norm": 0.5, "noise_multiplier": 1.0, "seed": 3}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))

    def forward(self, x, y=None):
        return {"logits": self.layers(x), "loss": torch.zeros(())}


def records():
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, generator=generator) + i % 2, "y": i % 2} for i in range(64)]


def losses(model, batch):
    return F.cross_entropy(model(batch["x"])["logits"], batch["y"], reduction="none")


def losses_of(*, bf16):
    def loss_fn(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return losses(model, batch)

    return loss_fn


def run(model, optimizer, *, bf16=False, **options):
    loss_fn = losses_of(bf16=bf16)
    return make_private(model, optimizer, records(), loss_fn, **with_speed(OPTIONS | options))


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def optimizer_and_schedule(model, kind):
    optimizer = kind(model.parameters(), lr=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def own_steps(kind, *, bf16=False, scheduled=True):
    """Weights after the run, stepped by `private.step`."""
    model = Network()
    optimizer, schedule = optimizer_and_schedule(model, kind)
    private = run(model, optimizer, bf16=bf16)
    for lot in private:
        private.step(lot)
        if scheduled:
            schedule.step()
    return weights(model)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, AdamBC])
@pytest.mark.parametrize("is_automatic", [False, True])
def test_lightning_takes_the_same_steps(tmp_path, is_automatic, kind, bf16):
    lightning = pytest.importorskip("lightning", reason="pip install lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization, self.network = is_automatic, Network()

        def forward(self, x):
            return self.network(x)

        def configure_optimizers(self):
            optimizer, schedule = optimizer_and_schedule(self, kind)
            self.private = run(self, optimizer, bf16=bf16)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def train_dataloader(self):
            return self.private

        def val_dataloader(self):
            return torch.utils.data.DataLoader(records(), batch_size=32)

        def validation_step(self, batch):
            self.log("loss", losses(self, batch).mean())

        def training_step(self, _):
            if is_automatic:
                return torch.zeros(())  # for `backward` below; a loss would be private
            self.optimizers().zero_grad()
            self.private.backward()
            self.optimizers().step()
            self.lr_schedulers().step()
            return None

        def backward(self, _):
            self.private.backward()

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False, val_check_interval=2,
        precision="bf16-mixed" if bf16 else 32, callbacks=[
            lightning.pytorch.callbacks.ModelCheckpoint(every_n_train_steps=2)],
    )  # fmt: skip
    trainer.fit(module)
    assert module.private.steps_taken == 6
    assert torch.equal(weights(module), own_steps(kind, bf16=bf16))


@pytest.mark.parametrize("is_automatic", [False, True])
def test_lightning_cannot_accumulate(tmp_path, is_automatic):
    lightning = pytest.importorskip("lightning", reason="pip install lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization, self.network = is_automatic, Network()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            self.private = run(self.network, optimizer)
            return optimizer

        def train_dataloader(self):
            return self.private

        def training_step(self, _, number):
            if is_automatic:
                return torch.zeros(())
            self.private.backward()
            if number % 2:  # as its documentation accumulates by hand
                self.optimizers().step()
                self.optimizers().zero_grad()
            return None

        def backward(self, _):
            self.private.backward()

    module, accumulation = Module(), {"accumulate_grad_batches": 2} if is_automatic else {}
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        **accumulation,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="no optimizer step has used the last release"):
        trainer.fit(module)
    assert module.private.steps_taken == 1


def private_trainer(folder, kind, *, bf16=False, **arguments):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    pytest.importorskip("accelerate", reason="pip install accelerate")
    # Without it, transformers takes the folder tests/datasets for it.
    pytest.importorskip("datasets.load", reason="pip install datasets")

    class PrivateTrainer(transformers.Trainer):
        def get_train_dataloader(self):
            return self.run

        def training_step(self, model, *_):
            model.train()
            self.run.backward()
            return torch.zeros(())

        def floating_point_ops(self, _):
            return 0

    model = Network()
    optimizer, schedule = optimizer_and_schedule(model, kind)
    arguments = transformers.TrainingArguments(
        str(folder), num_train_epochs=1, use_cpu=True, report_to="none", disable_tqdm=True,
        max_grad_norm=100.0, eval_strategy="steps", eval_steps=2, save_steps=2, logging_steps=1,
        bf16=bf16, **arguments,
    )  # fmt: skip
    trainer = PrivateTrainer(
        model, arguments, optimizers=(optimizer, schedule), eval_dataset=records()
    )
    trainer.run = run(model, optimizer, bf16=bf16)
    return trainer


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, AdamBC])
def test_the_trainer_takes_the_same_steps(tmp_path, kind, bf16):
    trainer = private_trainer(tmp_path, kind, bf16=bf16)
    trainer.train()
    assert trainer.run.steps_taken == trainer.state.global_step == 6
    assert torch.equal(weights(trainer.model), own_steps(kind, bf16=bf16))
    assert {log.get("loss", 0.0) for log in trainer.state.log_history} == {0.0}
    assert trainer.state.total_flos == 0  # would tell how many records were drawn


def test_the_trainer_cannot_take_several_lots_for_one_step(tmp_path):
    trainer = private_trainer(tmp_path, torch.optim.SGD, gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError, match="drawn but not used"):
        trainer.train()
    assert trainer.run.steps_taken == 0


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, AdamBC])
@pytest.mark.parametrize("rows", [64, 5])
def test_accelerate_takes_the_same_steps(rows, kind, bf16):
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16" if bf16 else "no")
    model = Network()
    optimizer, _ = optimizer_and_schedule(model, kind)
    model, optimizer = accelerator.prepare(model, optimizer)
    private = run(model, optimizer, bf16=bf16, max_microbatch=rows)
    for _ in private:
        optimizer.zero_grad()
        private.backward()
        accelerator.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
    expected = own_steps(kind, bf16=bf16, scheduled=False)
    slack = 1e-3 if kind is AdamBC else 1e-6  # it divides by small numbers
    assert torch.allclose(weights(model), expected, atol=slack if rows < 64 else 0.0, rtol=0.0)


def test_accelerate_cannot_accumulate():
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Network()
    optimizer, _ = optimizer_and_schedule(model, torch.optim.SGD)
    model, optimizer = accelerator.prepare(model, optimizer)
    private = run(model, optimizer)

    def accumulating():
        for _ in private:
            with accelerator.accumulate(model):
                private.backward()
                optimizer.step()  # does nothing every second time, as does the next line
                optimizer.zero_grad()

    with pytest.raises(RuntimeError, match="no optimizer step has used the last release"):
        accumulating()
    assert private.steps_taken == 1

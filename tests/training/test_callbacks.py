"""Callbacks get frozen records of released numbers, and nothing else."""

import dataclasses
import importlib.util
import io
import sys
from types import SimpleNamespace

import pytest

import tacit
from tacit.training import MLflow, NoisyLoss, ReleasedStep, RichProgress, TensorBoard, WandB

LOSS = NoisyLoss(upper=2.0)


def finish(private):
    for lot in private:
        private.step(lot)


def followed(problem, *callbacks, **options):
    settings = {"steps": 6, "seed": 0, "check": False, "delta": 1e-5, "noisy_loss": LOSS}
    case = problem(callbacks=callbacks, **(settings | options))
    finish(case.private)
    return case.private


def test_a_callback_gets_a_record_of_every_step(problem):
    records = []
    private = followed(problem, records.append)
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6]
    assert [r.epoch for r in records] == [1, 1, 1, 1, 2, 2]
    assert [r.is_epoch_end for r in records] == [False, False, False, True, False, True]
    assert [r.loss for r in records] == private.noisy_losses
    at = [private.epsilon_at(step, delta=1e-5) for step in (4, 6)]
    assert [r.epsilon for r in records] == [None, None, None, at[0], None, at[1]]
    mean = sum(private.noisy_losses[4:]) / 2
    assert records[5].epoch_loss == pytest.approx(mean)
    assert records[5].epoch_loss_std == pytest.approx(records[5].loss_std / 2**0.5)
    assert {(r.steps, r.epochs, r.noise_multiplier) for r in records} == {(6, 2, 1.0)}


def test_without_a_paid_loss_or_a_delta_there_are_none(problem):
    records = []
    private = followed(problem, records.append, noisy_loss=None, delta=None)
    assert {(r.loss, r.loss_std, r.epoch_loss, r.epsilon) for r in records} == {(None,) * 4}
    assert private.noisy_losses == []


def test_loops_that_call_backward_report_too(problem):
    records = []
    case = problem(callbacks=[records.append], check=False, max_microbatch=5)
    for _ in case.private:
        case.private.backward()
    assert [r.step for r in records] == [1, 2, 3, 4]


def test_a_record_is_frozen_and_made_of_plain_numbers(problem):
    """No field can hold a tensor, an array, or an object that leads to the run or its records."""
    records = []
    followed(problem, records.append)
    for record in records:
        for field in dataclasses.fields(ReleasedStep):
            value = getattr(record, field.name)
            values = value if type(value) is tuple else (value,)
            assert all(type(v) in (int, float, bool, type(None)) for v in values), field.name
        with pytest.raises(dataclasses.FrozenInstanceError):
            record.loss = 0.0


def test_records_follow_from_the_plan_and_the_noisy_losses_alone(problem):
    """Other records and other labels give the same record, as far as noise is not concerned."""
    fields = [
        f.name for f in dataclasses.fields(ReleasedStep) if f.name not in ("loss", "epoch_loss")
    ]
    seen = []
    for factor in (1.0, -3.0):
        records = []
        case = problem(check=False)
        followed(problem, records.append, data=(factor * case.x, 1 - case.y), delta=1e-5)
        seen.append([[getattr(r, name) for name in fields] for r in records])
    assert seen[0] == seen[1]


def test_an_error_of_a_callback_leaves_the_run_as_it_is_after_the_step(problem):
    def fails(released):
        if released.step == 2:
            raise KeyError("tracker")

    case = problem(callbacks=[fails], check=False)
    with pytest.raises(KeyError, match="tracker"):
        finish(case.private)
    assert case.private.steps_taken == 2
    finish(case.private)
    assert case.private.steps_taken == 4


def test_what_is_no_function_is_refused(problem):
    for wrong in (["tensorboard"], print):
        with pytest.raises(TypeError, match="callbacks must be a list of functions"):
            problem(callbacks=wrong, check=False)


def test_a_callback_cannot_take_a_step(problem):
    case = problem(callbacks=[lambda _: case.private.step(None)], check=False)
    with pytest.raises(RuntimeError, match="one step at a time"):
        finish(case.private)


class Writer:
    def __init__(self):
        self.rows, self.flushed = [], 0

    def add_scalar(self, name, value, step):
        self.rows.append((name, value, step))

    def flush(self):
        self.flushed += 1


def test_tensorboard_gets_the_released_numbers(problem):
    writer = Writer()
    private = followed(problem, TensorBoard(writer=writer, every=4))
    losses = {step: value for name, value, step in writer.rows if name == "tacit/loss"}
    assert losses == {4: private.noisy_losses[3], 6: private.noisy_losses[5]}
    assert writer.flushed == 2
    with pytest.raises(ValueError, match="folder or writer"):
        TensorBoard()


def test_mlflow_gets_the_released_numbers(problem, monkeypatch):
    rows = []
    fake = SimpleNamespace(log_metrics=lambda metrics, **where: rows.append((metrics, where)))
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    private = followed(problem, MLflow(run_id="a"))
    assert [where for _, where in rows] == [{"step": s, "run_id": "a"} for s in range(1, 7)]
    assert [metrics["loss"] for metrics, _ in rows] == private.noisy_losses


def test_wandb_gets_the_released_numbers(problem):
    rows = []
    run = SimpleNamespace(log=lambda metrics, step: rows.append((step, metrics)))
    private = followed(problem, WandB(run))
    assert [step for step, _ in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1][1]["epsilon"] == private.epsilon(delta=1e-5)


def test_rich_shows_epoch_epsilon_and_loss(problem):
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn

    out = io.StringIO()
    console = Console(file=out, width=120)
    columns = TextColumn("{task.description}"), MofNCompleteColumn()
    with Progress(*columns, console=console) as progress:
        private = followed(problem, RichProgress(progress))
    epsilon = private.epsilon(delta=1e-5)
    assert f"epoch 2/2, epsilon so far {epsilon:.3g}, noisy loss" in out.getvalue()
    assert "6/6" in out.getvalue()


def test_several_clip_norms_have_a_metric_each(problem):
    records = []
    clip = tacit.training.PerLayer((0.5, 0.25))
    followed(problem, records.append, clip_norm=clip, noisy_loss=None)
    metrics = records[-1].metrics()
    assert (metrics["clip_norm_0"], metrics["clip_norm_1"]) == (0.5, 0.25)


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
def test_the_real_tensorboard_reads_what_was_written(problem, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    private = followed(problem, TensorBoard(tmp_path))
    found = EventAccumulator(str(tmp_path)).Reload().Scalars("tacit/loss")
    assert [e.value for e in found] == pytest.approx(private.noisy_losses)


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_the_real_mlflow_keeps_what_was_logged(problem, tmp_path):
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/m.db")
    with mlflow.start_run() as run:
        private = followed(problem, MLflow())
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [m.value for m in history] == private.noisy_losses


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_the_real_wandb_keeps_what_was_logged(problem, tmp_path):
    import wandb

    with wandb.init(mode="offline", dir=str(tmp_path), project="tacit") as run:
        private = followed(problem, WandB(run))
        run.log({"end": 1.0}, step=7)  # W&B writes a step when the next one comes
        assert run.summary["loss"] == private.noisy_losses[-1]

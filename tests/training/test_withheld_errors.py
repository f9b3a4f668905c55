"""Errors of the user's program show where they happened, and no value."""

import asyncio
import sys
import tempfile
import traceback
from pathlib import Path

import pytest
import torch
from looped_reference import set_up
from slow_cases import one_fast
from speed_options import with_speed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import tacit
from tacit.errors import ProgramError
from tacit.training import Speed
from tacit.training.withheld_errors import ErrorGuard

SECRET = 31337
RECORDS = 40


def data(secret_at: int | None = 17):
    x, y = torch.randn(RECORDS, 4), torch.zeros(RECORDS, dtype=torch.long)
    if secret_at is not None:
        y[secret_at] = SECRET
    return x, y


class Table(Dataset):
    def __init__(self, fails: bool = False):
        self.x, self.y = data()
        self.fails = fails

    def __len__(self):
        return RECORDS

    def __getitem__(self, i):
        if self.fails and self.y[i] == SECRET:
            raise KeyError(f"no class {int(self.y[i])}")
        return self.x[i], self.y[i]


def plain_loss(m, batch):
    x, y = batch
    return F.cross_entropy(m(x), y, reduction="none")


def safe_loss(m, batch):
    return m(batch[0]).square().mean(1) * (batch[1] < 0.5 * SECRET)


def collate(records):
    y = torch.stack([y for _, y in records])
    assert int(y.max()) < SECRET, f"label {int(y.max())}"
    return torch.stack([x for x, _ in records]), y


def augment(batch):
    x, y = batch
    if int(y.max()) == SECRET:
        try:
            {}[int(y.max())]
        except KeyError as error:
            raise ValueError(f"cannot draw {int(y.max())}") from error
    return x, y


class Looks(nn.Linear):
    """A model that cannot be traced, since it reads values."""

    def forward(self, x):
        if bool((x > 100).any()):
            raise ValueError("never")
        return super().forward(x)


STAGES = {
    "the data set": {"dataset": Table(fails=True), "loss_fn": safe_loss},
    "collate_fn": {"dataset": Table(), "loss_fn": safe_loss, "collate_fn": collate},
    "augment": {"dataset": data(), "loss_fn": safe_loss, "augment": augment},
    "the model or loss_fn": {"dataset": data(), "loss_fn": plain_loss},
}


def run(stage: str, *, kind=nn.Linear, **options):
    torch.manual_seed(0)
    model = kind(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = dict(STAGES[stage]) | options
    return tacit.make_private(
        model, optimizer, arguments.pop("dataset"), arguments.pop("loss_fn"),
        batch_size=arguments.pop("batch_size", 20), steps=4,
        clip_norm=1.0, noise_multiplier=1.0, seed=3, **with_speed(arguments),
    )  # fmt: skip


def train(private):
    for lot in private:
        private.step(lot)


def assert_hides(caught, stage, *, is_traced=False):
    text = "".join(traceback.format_exception(caught.value))
    assert str(SECRET) not in text
    assert str(caught.value).startswith(f"{stage} raised ")
    if not is_traced:  # else no line of the user's runs on records
        assert "test_withheld_errors.py:" in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_in_a_step_is_shown_without_its_text(stage):
    private = run(stage, check=False)
    with pytest.raises(ProgramError) as caught:
        train(private)
    assert_hides(caught, stage, is_traced=stage == "the model or loss_fn")
    assert "IndexError" in str(caught.value) or stage != "the model or loss_fn"


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_of_a_run_that_is_compared_first_is_shown_without_its_text(stage):
    with pytest.raises(ProgramError) as caught:
        train(run(stage))
    assert_hides(caught, stage, is_traced=stage == "the model or loss_fn")


@pytest.mark.filterwarnings("ignore:.*cannot be traced")
def test_the_loop_over_records_withholds_the_text():
    private = run("the model or loss_fn", check=False, kind=Looks)
    with pytest.raises(ProgramError) as caught:
        train(private)
    assert_hides(caught, "the model or loss_fn")


@pytest.mark.parametrize(
    "loss_fn", [nn.CrossEntropyLoss(), lambda output, target: F.cross_entropy(output, target)]
)
def test_a_loss_with_other_arguments_is_told_which_it_gets(loss_fn):
    with pytest.raises(TypeError, match=r"called as loss_fn\(model, batch\)"):
        run("the model or loss_fn", dataset=data(None), loss_fn=loss_fn)


@pytest.mark.slow
def test_a_compiled_step_withholds_the_text():
    private = run("the model or loss_fn", check=False, compile=True)
    with pytest.raises(ProgramError) as caught:
        train(private)
    assert str(SECRET) not in "".join(traceback.format_exception(caught.value))


def test_worker_processes_withhold_the_text():
    private = run("the data set", check=False, num_workers=1)
    with pytest.raises(ProgramError) as caught:
        train(private)
    assert str(SECRET) not in "".join(traceback.format_exception(caught.value))
    assert "the data set raised KeyError" in str(caught.value)


def test_reading_for_a_loop_of_ones_own_withholds_the_text():
    for what in ("the data set", "collate_fn"):
        lot = next(iter(run(what, check=False, batch_size=RECORDS)))
        with pytest.raises(ProgramError) as caught:
            tuple(lot)
        assert_hides(caught, what)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        label = int(ctx.saved_tensors[0].max())
        if label == SECRET:
            raise ValueError(f"label {label}")
        return g, None


def test_backward_withholds_the_text():
    def loss_fn(model, batch):
        x, y = batch
        return Fails.apply(model(x).sum(1), y)

    private = run("the model or loss_fn", loss_fn=loss_fn, check=False, batch_size=RECORDS)
    lots = iter(private)
    next(lots)
    with pytest.raises(ProgramError) as caught:
        private.backward()
    assert_hides(caught, "the model or loss_fn")


def test_debug_shows_the_text():
    with pytest.raises(IndexError, match=str(SECRET)):
        train(run("the model or loss_fn", check=False, errors_in_full=True))
    with pytest.raises(AssertionError, match=str(SECRET)):
        train(run("collate_fn", errors_in_full=True))


def test_a_failed_step_can_be_repeated_and_an_interrupt_passes():
    errors = []

    def loss_fn(m, batch):
        if errors:
            raise errors.pop()
        return m(batch[0]).square().mean(1)

    with set_up("alone"):
        private = run("the model or loss_fn", loss_fn=loss_fn, check=False)
    errors += [ValueError("once"), KeyboardInterrupt()]
    lot = next(iter(private))
    with pytest.raises(KeyboardInterrupt):
        private.step(lot)
    with pytest.raises(ProgramError, match="raised ValueError in loss_fn"):
        private.step(lot)
    private.step(lot)
    assert private.steps_taken == 1


def test_own_errors_stay_readable_and_lose_their_causes():
    from tacit.training.tree import check_losses

    try:
        raise KeyError(SECRET)
    except KeyError:
        with pytest.raises(ValueError, match="one loss per example") as caught:
            ErrorGuard()(check_losses, torch.tensor(1.0), 3)
    assert caught.value.__context__ is None


def test_a_torch_error_from_a_frame_of_tacit_is_withheld():
    """The innermost Python frame is tacit's, but it did not raise by itself."""
    model = nn.Embedding(5, 2)
    ids = torch.full((RECORDS, 3), SECRET)
    private = tacit.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), (ids,),
        lambda m, b: m(b[0]).square().mean((1, 2)), batch_size=20, steps=1, clip_norm=1.0,
        noise_multiplier=1.0, speed=Speed(check=False),
    )  # fmt: skip
    with pytest.raises(ProgramError, match="raised IndexError"):
        train(private)


def _exits():
    sys.exit(f"label {SECRET}")


def _exits_with_status():
    sys.exit(SECRET)


def _is_interrupted():
    raise KeyboardInterrupt(SECRET)


def _is_cancelled():
    raise asyncio.CancelledError(SECRET)


def _ends_in_its_own_way():
    class Ended(BaseException):
        pass

    raise Ended(SECRET)


def _raises_a_group():
    raise BaseExceptionGroup(f"label {SECRET}", [KeyboardInterrupt(SECRET), ValueError(SECRET)])


def _has_a_note():
    error = ValueError("x")
    error.add_note(f"label {SECRET}")
    raise error


def _pretends_to_be_withheld():
    raise ProgramError(f"label {SECRET}")


def _asks_tacit():
    tacit.events.Gaussian(-SECRET)


def _asks_tacit_for_training():
    tacit.training.Speed(compile=f"x{SECRET}")


def _names_a_class_by_a_value():
    raise type(f"Label{SECRET}", (ValueError,), {})


def _names_a_file_by_a_value():
    exec(compile("raise ValueError", f"label-{SECRET}.py", "exec"))


def _names_a_function_by_a_value():
    space = {}
    exec(f"def label_{SECRET}():\n    raise ValueError", space)
    space[f"label_{SECRET}"]()


def _renames_its_code():
    def fail():
        raise ValueError

    fail.__code__ = fail.__code__.replace(co_name=f"label_{SECRET}")
    fail()


def _moves_its_code():
    def fail():
        raise ValueError

    fail.__code__ = fail.__code__.replace(co_firstlineno=SECRET)
    fail()


def _writes_a_file_named_by_a_value():
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"label_{SECRET}.py"
        file.write_text("raise ValueError")
        exec(compile(file.read_text(), str(file), "exec"))


def _exits_with_a_tensor():
    sys.exit(torch.tensor([SECRET, SECRET]))


def _fails_when_it_is_shown():
    class Failing(Exception):
        def __str__(self):
            raise ValueError(SECRET)

    raise Failing(SECRET)


FAILURES = {
    _asks_tacit_for_training: ProgramError,
    _names_a_class_by_a_value: ProgramError,
    _names_a_file_by_a_value: ProgramError,
    _names_a_function_by_a_value: ProgramError,
    _renames_its_code: ProgramError,
    _moves_its_code: ProgramError,
    _writes_a_file_named_by_a_value: ProgramError,
    _exits_with_a_tensor: SystemExit,
    _fails_when_it_is_shown: ProgramError,
    _exits: SystemExit,
    _exits_with_status: SystemExit,
    _is_interrupted: KeyboardInterrupt,
    _is_cancelled: asyncio.CancelledError,
    _ends_in_its_own_way: ProgramError,
    _raises_a_group: ProgramError,
    _has_a_note: ProgramError,
    _pretends_to_be_withheld: ProgramError,
    _asks_tacit: ProgramError,
}


@pytest.mark.parametrize("fail", one_fast(FAILURES, 4), ids=lambda fail: fail.__name__)
@pytest.mark.parametrize("stage", ["data set", "length", "loss_fn"])
def test_no_way_to_fail_shows_a_value(fail, stage):
    class Failing(Table):
        is_failing = False

        def __len__(self):
            return fail() if self.is_failing == "length" else RECORDS

        def __getitem__(self, i):
            return fail() if self.is_failing == "data set" else super().__getitem__(i)

    dataset, model = Failing(), nn.Linear(4, 2)

    def loss_fn(m, batch):
        return fail() if dataset.is_failing == "loss_fn" else safe_loss(m, batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"batch_size": 20, "steps": 1, "clip_norm": 1.0, "noise_multiplier": 1.0}
    options["speed"] = Speed(check=False)

    def make():
        return tacit.make_private(model, optimizer, dataset, loss_fn, **options)

    with set_up("alone"):  # a traced loss_fn does not run on records
        private = make()
    dataset.is_failing = stage
    with pytest.raises(FAILURES[fail]) as caught:
        make() if stage == "length" else train(private)
    error = caught.value
    assert error.__cause__ is error.__context__ is None
    assert not hasattr(error, "__notes__")
    assert str(SECRET) not in f"{error} {error.args}"


def test_a_loss_of_another_type_is_refused_without_a_value():
    kind = type(f"Label{SECRET}", (dict,), {})
    with pytest.raises(TypeError, match="must return a tensor, got dict"):
        run("the model or loss_fn", loss_fn=lambda *_: kind())


def test_an_array_that_cannot_be_read_shows_no_value():
    class Column:
        dtype = "float"

        def to_numpy(self):
            raise ValueError(SECRET)

        __array__ = __len__ = to_numpy

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ProgramError, match="raised ValueError"):
        tacit.make_private(
            model, optimizer, (Column(),), safe_loss,
            batch_size=20, steps=1, clip_norm=1.0, noise_multiplier=1.0,
        )  # fmt: skip

"""Model files, recipes, ledgers and certificates of strangers: nothing runs, nothing breaks.

Crafted files first, then files of this package with random edits. Each is opened through the
command line or the public function that opens it. The result must be an answer or an error of one
sentence: no exception other than those that callers catch, and no code of the file's choice.
"""

import json
import os
import random
import shutil
import sqlite3
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tacit import Budget, Ledger
from tacit import events as ev
from tacit._untrusted import parse_json, printable, time_limit
from tacit.cli import app
from tacit.errors import TacitError
from tacit.experiments import Recipe, load_model, train

EXPECTED = (ValueError, OSError, TacitError)  # what the command line turns into one sentence
RECIPE = "[training]\nbatch_size = 360\nepochs = 1\n[run]\nbaseline_steps = 0\n"


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path, monkeypatch):
    """Fail if a file `ran` appears, which hostile files below try to write."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with its certificate."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(Recipe.parse(RECIPE), folder)
    assert CliRunner().invoke(app, ["report", str(folder)]).exit_code == 0
    return folder


def model_file(path: Path, recipe: str, tensors=None, about=None) -> Path:
    import torch
    from safetensors.torch import save_file

    header = {"recipe": recipe, "shape": [4], "n_classes": 2} if about is None else about
    tensors = {"weight": torch.zeros(2, 4)} if tensors is None else tensors
    save_file(tensors, path, {"tacit": header if isinstance(header, str) else json.dumps(header)})
    return path


def module(name: str, **arguments) -> str:
    listed = "\n".join(f"{key} = {json.dumps(value)}" for key, value in arguments.items())
    return f'[model]\nkind = "module"\nmodule = "{name}"\n[model.arguments]\n{listed}\n'


HOSTILE_MODULES = [
    module("os:system", command="touch ran"),
    module("subprocess:run", args=["touch", "ran"]),
    module("builtins:open", file="ran", mode="w"),
    module("posix:system", command="touch ran"),
    module("torch.nn:Module.__init__"),
    module("torch:load", f="x"),
    module("torch.hub:load", repo_or_dir="x", model="y"),
    module("torch.nn.modules.module:register_module_forward_hook", hook="x"),
    module("torch.nn:Transformer", num_encoder_layers=10**9),
    module("torch.nn:LSTM", input_size=1, hidden_size=1, num_layers=10**9),
    module("torch.nn:Linear", in_features=10**12, out_features=10**12),
    module("torch.nn:Linear", in_features=-4, out_features=2),
    module("torch.nn:Linear", in_features="four", out_features=2),
    module("torch.nn:Sequential", layers=[["Linear", 4, 10**15]]),
    module("torch.nn:Sequential", layers=[["Sequential"], ["os.system", "touch ran"]]),
    module("torch.nn:Sequential", layers=[[]]),
    module("torch.nn:Sequential", layers=[["ReLU"]] * 5000),
    module("torch.nn:Sequential", layers="ReLU"),
    module("pickle:loads", data="cos\nsystem\n(S'touch ran'\ntR."),
    module("tests.evil:Model"),
    module(""),
    module("os"),
]


@pytest.mark.parametrize("recipe", HOSTILE_MODULES, ids=lambda text: text.split('"')[3])
def test_a_model_file_cannot_choose_code(tmp_path, recipe):
    start = time.monotonic()
    with pytest.raises(ValueError):  # noqa: PT011  # any sentence
        load_model(model_file(tmp_path / "model.safetensors", recipe))
    (tmp_path / "recipe.toml").write_text(recipe)
    result = CliRunner().invoke(app, ["train", str(tmp_path / "recipe.toml"), "--out", "x"])
    if "torch.nn:" not in recipe or "Linear" not in recipe:  # such layers may train, or be refused
        assert result.exit_code == 2
        assert isinstance(result.exception, SystemExit)
    assert time.monotonic() - start < 20


def test_a_user_module_needs_to_be_named(tmp_path, monkeypatch):
    (tmp_path / "clinic_net.py").write_text(
        "import os\nfrom os import system\nfrom torch import nn\n"
        "class Net(nn.Linear):\n    def __init__(self):\n        super().__init__(4, 2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import torch

    weights = {"weight": torch.ones(2, 4), "bias": torch.zeros(2)}
    file = model_file(tmp_path / "model.safetensors", module("clinic_net:Net"), weights)
    with pytest.raises(ValueError, match="--trust-code clinic_net"):
        load_model(file)
    assert "clinic_net" not in sys.modules
    model = load_model(file, trust_code=["clinic_net"]).model
    assert torch.equal(model.weight, weights["weight"])
    borrowed = model_file(
        tmp_path / "b.safetensors", module("clinic_net:system", command="touch ran")
    )
    with pytest.raises(ValueError, match="neither an nn"):
        load_model(borrowed, trust_code=["clinic_net"])


def test_layers_of_the_table_are_loaded_with_their_weights(tmp_path):
    import torch

    layers = [["Flatten"], ["Linear", 4, 3], ["ReLU"], ["Linear", 3, 2]]
    recipe = module("torch.nn:Sequential", layers=layers)
    expected = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)
    )
    file = model_file(tmp_path / "m.safetensors", recipe, dict(expected.state_dict()))
    x = torch.randn(5, 4)
    assert torch.equal(load_model(file).model(x), expected(x))


@pytest.mark.parametrize(
    "about",
    [
        "no json",
        "[" * 50_000,
        '{"recipe": "", "recipe": "x"}',
        {"recipe": "", "shape": [10**15], "n_classes": 10**15},
        {"recipe": "", "shape": [2**30], "n_classes": 2**30},
        {"recipe": "", "shape": [], "n_classes": 2},
        {"recipe": "", "shape": ["x"], "n_classes": 2},
        {"recipe": 7, "shape": [4], "n_classes": 2},
        {"recipe": "[model]\nkind='mlp'\nhidden=[1073741824, 1073741824]", "shape": [4]},
        {"recipe": "[features]\nkind='pca'", "shape": [4], "n_classes": 2},
        {"recipe": "a = " + "[" * 20_000, "shape": [4], "n_classes": 2},
        [],
        "null",
    ],
    ids=str,
)
def test_a_hostile_header_is_refused(tmp_path, about):
    with pytest.raises(ValueError):  # noqa: PT011  # any sentence
        load_model(model_file(tmp_path / "model.safetensors", "", about=about))


def edits(content: bytes, rng: random.Random) -> bytes:
    """Return `content` with some bytes changed, cut, doubled or replaced by unpleasant ones."""
    raw = bytearray(content)
    pieces = [
        b"\x1b[2J",
        b"[" * 300,
        b"null",
        b"-1",
        b"1e999",
        b"NaN",
        b'"',
        b"\xff\xfe",
        b"{}",
        b"0",
    ]
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(raw) + 1)
        match rng.randrange(4):
            case 0:
                raw[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del raw[at : at + rng.choice((1, 5, 100))]
            case 2:
                raw[at : at + rng.choice((0, 1, 4))] = rng.choice(pieces)
            case _:
                raw[at:at] = raw[at : at + rng.choice((3, 40))]
    return bytes(raw)


def opened(place: Path, name: str) -> None:
    """Open one file of a run folder in every way that this package offers."""
    if name == "model.safetensors":
        try:
            load_model(place / name)
        except EXPECTED:
            return
    verbs = [["verify", str(place)]]
    if name == "certificate.json":
        verbs.append(["verify", str(place / name), "--json"])
    if name == "run.ledger":
        verbs += [["ledger", verb, str(place / name)] for verb in ("show", "verify", "export")]
    if name == "recipe.toml":
        verbs.append(["train", str(place / name), "--out", str(place)])
    for verb in verbs:
        result = CliRunner().invoke(app, verb)
        assert result.exception is None or isinstance(result.exception, SystemExit), (
            verb,
            repr(result.exception),
        )
        assert "\x1b[2J" not in result.output


FILES = ("model.safetensors", "recipe.toml", "run.ledger", "certificate.json", "facts.json")


def fuzz(finished: Path, place: Path, name: str, tries: int, seed: int) -> None:
    rng = random.Random(f"{name} {seed}")
    for _ in range(tries):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(finished, place)
        (place / name).write_bytes(edits((finished / name).read_bytes(), rng))
        opened(place, name)


@pytest.mark.parametrize("name", FILES)
def test_random_edits_end_in_an_answer(finished, tmp_path, name):
    fuzz(finished, tmp_path / "run", name, 3, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_many_random_edits_end_in_an_answer(finished, tmp_path, name):
    fuzz(finished, tmp_path / "run", name, 100, seed=1)


def hostile_ledger(path: Path, *commands: str) -> Path:
    with Ledger(path, Budget(1.0, 1e-5)) as ledger:
        ledger.spend(ev.Gaussian(20.0), note="\x1b[2J\x1b]0;owned\x07 \u202e note")
    connection = sqlite3.connect(path)
    for name in ("entry_is_fixed", "entry_stays", "ledger_is_fixed"):
        connection.execute(f"DROP TRIGGER {name}")
    for command in commands:
        connection.execute(command)
    connection.commit()
    connection.close()
    return path


LOOP = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT x FROM c"
LEDGER_EDITS = [
    (),
    (f"CREATE VIEW loop AS {LOOP}",),
    ("ALTER TABLE entry RENAME TO e2", f"CREATE VIEW entry AS {LOOP}"),
    ("CREATE TRIGGER t AFTER INSERT ON entry BEGIN DELETE FROM total; END",),
    ("UPDATE entry SET event = '" + "[" * 50_000 + "'",),
    ("UPDATE entry SET event = 17",),
    ("UPDATE entry SET cost = '{\"renyi\": 3}'",),
    ("UPDATE entry SET cost = '[]'",),
    ("UPDATE entry SET cost = NULL",),
    ("UPDATE entry SET filter = NULL",),
    ("UPDATE entry SET filter = '{}'",),
    ("UPDATE entry SET steps = 'x'",),
    ('UPDATE total SET cost = \'{"pure": "1/0", "renyi": [], "gaussian": 0, "delta": 0}\'',),
    ("UPDATE total SET entries = 'many'",),
    ("UPDATE ledger SET relation = 'friends'",),
    ("UPDATE ledger SET epsilon = -1",),
    ("UPDATE ledger SET epsilon = 'x'",),
    ("UPDATE ledger SET delta = 7",),
    ("UPDATE head SET entries = 'x'",),
    ("DELETE FROM head",),
    ("DELETE FROM ledger",),
]


@pytest.mark.parametrize("commands", LEDGER_EDITS, ids=lambda c: str(c)[:60])
def test_a_hostile_ledger_gives_an_answer_without_escapes(tmp_path, commands):
    file = hostile_ledger(tmp_path / "a.ledger", *commands)
    for verb in ("show", "verify", "export"):
        result = CliRunner().invoke(app, ["ledger", verb, str(file)])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert not any(sign in result.output for sign in ("\x1b]0", "\x1b[2J", "\x07", "\u202e"))
    with pytest.raises(EXPECTED) if commands else nothing(), Ledger(file) as ledger:
        ledger.spend(ev.Gaussian(30.0))


class nothing:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


def test_a_title_cannot_steer_the_terminal(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    alone = tmp_path / "certificate.json"
    certificate = json.loads((finished / "certificate.json").read_text())
    from tacit.report.certificate import seal

    certificate["title"] = "\x1b[2J\x9b31m\u202eharmless\x07"
    certificate["model"] = None
    body = {name: value for name, value in certificate.items() if name != "seal"}
    alone.write_text(json.dumps(body | {"seal": seal(body)}))
    for options in ([], ["--json"]):
        shown = CliRunner().invoke(app, ["verify", str(alone), *options]).output
        assert not any(sign in shown for sign in "\x1b\x9b\u202e\x07")


def deep(levels: int) -> dict:
    event = ev.Gaussian(2.0).to_dict()
    for _ in range(levels):
        event = {"type": "Repeated", "event": event, "count": 2}
    return event


MANY = [ev.PoissonSampled(0.01, ev.Gaussian(1 + k * 1e-4)).to_dict() for k in range(8000)]
LARGE = {
    "title": {"title": "x" * 1_000_000},
    "events": {"claim": {"events": {"type": "Sequence", "parts": MANY}}},
    "utility": {"utility": {str(k): k for k in range(70_000)}},
    "touches": {"claim": {"data_touches": [{"what": "x", "paid": "y"}] * 35_000}},
    "prices": {"prices": [{"accountant": "PLD", "version": "1", "epsilon": 1.0}] * 16_000},
    "deep": {"claim": {"events": deep(90)}},
    "digits": {"claim": {"n_records_assumed_public": 10**4000}},
}


@pytest.mark.parametrize("name", LARGE)
def test_a_certificate_of_one_megabyte_is_answered_within_two_seconds(finished, tmp_path, name):
    certificate = json.loads((finished / "certificate.json").read_text())
    for field, value in LARGE[name].items():
        is_part = isinstance(value, dict) and field == "claim"
        certificate[field] = {**certificate[field], **value} if is_part else value
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(certificate))
    start = time.process_time()
    result = CliRunner().invoke(app, ["verify", str(file)])
    assert result.exit_code in (1, 2)
    assert isinstance(result.exception, SystemExit)
    assert time.process_time() - start < 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_pricing_a_certificate_has_a_time_limit(finished, tmp_path):
    certificate = json.loads((finished / "certificate.json").read_text())
    certificate["claim"]["events"] = {"type": "Sequence", "parts": MANY[:3000]}
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(certificate))
    start = time.monotonic()
    result = CliRunner().invoke(app, ["verify", str(file), "--seconds", "1"])
    assert result.exit_code in (1, 2)
    assert time.monotonic() - start < 10


def test_strict_json_and_printable_text():
    for text in ('{"a": 1, "a": 2}', "NaN", "[" * 200 + "]" * 200, "1" * 5000, '"\\ud800'):
        with pytest.raises(ValueError):  # noqa: PT011  # any sentence
            parse_json(text, name="x")
    assert parse_json('{"[[[": ["{{", "\\"["]}', name="x") == {"[[[": ["{{", '"[']}
    assert printable("a\x1b[0m\u2028b\nc") == "a\\x1b[0m\\u2028b c"


def test_a_time_limit_ends_and_leaves_no_timer():
    import signal

    with (
        pytest.raises(TimeoutError, match="counting took longer"),
        time_limit(0.05, what="counting"),
    ):
        all(True for _ in iter(int, 1))
    before = signal.getitimer(signal.ITIMER_REAL)[0]  # of the test runner, or 0
    with time_limit(5.0, what="nothing"):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL)[0] <= before


def test_a_package_path_in_a_recipe_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "__init__.py").write_text("raise SystemError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    from tacit.experiments import data

    text = '[data]\nname = "table"\npath = "package:evil.sub/x.csv"\n[data.schema]\ntarget = "y"\n'
    text += '[data.schema.columns.y]\ncategories = ["a", "b"]\n'
    with pytest.raises(ModuleNotFoundError, match=r"evil\.sub"):
        data.load(Recipe.parse(text).data)
    assert "evil" not in sys.modules


class Hostile:
    """A value whose pickle writes the file `ran` when it is opened."""

    def __reduce__(self):
        return os.system, ("touch ran",)


def test_outcomes_of_a_search_from_another_account_are_not_opened(tmp_path, monkeypatch):
    from tacit.tuning.private_run import Outcome
    from tacit.tuning.unfinished import Unfinished

    ledger = tmp_path / "a.ledger"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "stranger"))
    theirs = Unfinished(ledger, seed=7)
    theirs.write(0, Outcome(1.0, Hostile()))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    mine = Unfinished(ledger, seed=7)
    (folder,) = tmp_path.glob(".a.ledger.search-*")
    folder.rename(mine._folder)
    assert mine.read(0) is None
    mine.write(1, Outcome(2.0, "kept"))
    assert mine.read(1) == Outcome(2.0, "kept")


def test_verification_does_not_open_the_witness_that_a_ledger_names(tmp_path):
    """Neither an address on the network nor a file on the reader's disk is touched."""
    from tacit.report import verify_run

    with Ledger(tmp_path / "a.ledger", Budget(9.0, 1e-5), witness=tmp_path / "w"):
        pass
    train(Recipe.parse(RECIPE + '[privacy]\nledger = "a.ledger"\n'), tmp_path / "run")
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run")]).exit_code == 0
    (tmp_path / "w").unlink()
    os.mkfifo(tmp_path / "w")  # opening it would wait for ever
    assert verify_run(tmp_path / "run") == []

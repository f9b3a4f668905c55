"""An honest certificate holds; one with any field edited does not."""

import copy
import json
import math

import pytest
from typer.testing import CliRunner

from tacit import events as ev
from tacit.cli import app
from tacit.events import Relation
from tacit.report import make_certificate, verify
from tacit.report.certificate import seal

EVENT = ev.Sequence((ev.Gaussian(8.0), ev.Repeated(ev.PoissonSampled(0.02, ev.Gaussian(1.3)), 500)))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


@pytest.fixture
def certificate(folder):
    return make_certificate(
        event=EVENT,
        delta=1e-5,
        relation=Relation.ADD_REMOVE,
        unit="record",
        n_records=50_000,
        sampling_used="Poisson, drawn for every step",
        data_touches=[{"what": "training", "paid": "by the events"}],
        released=["the model after the last step"],
        randomness="OS entropy",
        utility={"test accuracy": [0.91, 0.92], "non-private": 0.95},
        software={"python": "3.11"},
        created="2026-11-15",
        title="a test",
        model=folder / "model.safetensors",
    )


def leaves(value, path=()):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path


def edited(value):
    if isinstance(value, bool) or value is None:
        return "edited"
    if isinstance(value, int):
        return value + 1
    return value * 1.01 + 1e-9 if isinstance(value, float) else value + "x"


def changed(certificate, path):
    copied = copy.deepcopy(certificate)
    place = copied
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = edited(place[path[-1]])
    return copied


def test_an_honest_certificate_holds_also_after_a_file(certificate, folder):
    again = json.loads(json.dumps(certificate))
    assert verify(again, folder=folder) == []
    assert again["claim"]["epsilon"] == pytest.approx(again["prices"][0]["epsilon"])
    assert [entry["accountant"] for entry in again["prices"]][:2] == ["PLD", "RDP"]


def test_every_edited_field_is_found(certificate, folder):
    paths = list(leaves(certificate))
    assert len(paths) > 25
    for path in paths:
        assert verify(changed(certificate, path), folder=folder), path


def test_every_missing_field_is_found(certificate, folder):
    for name in certificate:
        rest = {key: value for key, value in certificate.items() if key != name}
        assert verify(rest, folder=folder), name
    for name in certificate["claim"]:
        broken = copy.deepcopy(certificate)
        del broken["claim"][name]
        assert verify(broken, folder=folder), name


@pytest.mark.parametrize(
    "path",
    [
        ("claim", "epsilon"),
        ("claim", "delta"),
        ("claim", "events", "parts", 1, "count"),
        ("claim", "events", "parts", 1, "event", "rate"),
        ("claim", "sampling", "assumed"),
        ("prices", 0, "epsilon"),
        ("prices", 1, "epsilon"),
        ("prices", 0, "lower"),
        ("model", "sha256"),
    ],
)
def test_sealing_again_does_not_hide_a_false_price(certificate, folder, path):
    forged = changed(certificate, path)
    if path[-1] == "sha256":
        forged["model"]["sha256"] = "0" * 64
    forged["seal"] = seal({k: v for k, v in forged.items() if k != "seal"})
    assert verify(forged, folder=folder)


def test_a_smaller_epsilon_is_named_with_the_true_one(certificate):
    forged = copy.deepcopy(certificate)
    forged["claim"]["epsilon"] /= 2
    forged["seal"] = seal({k: v for k, v in forged.items() if k != "seal"})
    (problem,) = verify(forged)
    assert problem.field == "claim.epsilon"
    assert f"{certificate['claim']['epsilon']:.6g}" in problem.what


def test_another_model_file_is_found(certificate, folder):
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert [p.field for p in verify(certificate, folder=folder)] == ["model.sha256"]
    (folder / "model.safetensors").unlink()
    assert [p.field for p in verify(certificate, folder=folder)] == ["model.file"]


def test_a_hostile_event_is_a_problem_and_no_crash(certificate):
    hostile = copy.deepcopy(certificate)
    hostile["claim"]["events"] = {"type": "os.system", "command": "true"}
    assert any(p.field == "claim.events" for p in verify(hostile))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_a_problem_and_no_crash(certificate, value):
    for field in ("epsilon", "delta"):
        forged = copy.deepcopy(certificate)
        forged["claim"][field] = value
        assert verify(forged)


def test_a_price_cannot_be_stated_twice(certificate):
    forged = copy.deepcopy(certificate)
    forged["prices"].insert(0, forged["prices"][0] | {"epsilon": 0.1})
    forged["seal"] = seal({k: v for k, v in forged.items() if k != "seal"})
    assert [problem.field for problem in verify(forged)] == ["prices"]


def test_the_command_says_1_to_whatever_does_not_hold(certificate, folder):
    file = folder / "certificate.json"

    def asked(text):
        file.write_text(text)
        return CliRunner().invoke(app, ["verify", str(file)])

    honest = json.dumps(certificate)
    assert asked(honest).exit_code == 0
    epsilon = json.dumps(certificate["claim"]["epsilon"])
    assert asked(honest.replace(f'"epsilon": {epsilon}', '"epsilon": NaN', 1)).exit_code == 1
    result = asked(honest.replace('"epsilon": ', '"epsilon": 0.01, "epsilon": ', 1))
    assert result.exit_code == 1
    assert "epsilon appears twice" in result.stderr
    assert asked("[]").exit_code == 1
    assert asked("[" * 100_000).exit_code == 1


def test_a_run_without_noise_has_no_epsilon(tmp_path):
    certificate = make_certificate(
        event=ev.NonPrivate(),
        delta=1e-5,
        relation=Relation.ADD_REMOVE,
        unit="record",
        n_records=10,
        sampling_used="all records",
        data_touches=[],
        released=[],
        randomness="none",
        utility={},
        software={},
        created="2026-11-15",
        title="no noise",
    )
    assert certificate["claim"]["epsilon"] is None
    assert verify(certificate) == []
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(certificate))
    assert "epsilon infinity" in CliRunner().invoke(app, ["verify", str(file)]).stdout


def claim_of(event, **options):
    made = make_certificate(
        event=event, delta=1e-5, relation=Relation.ADD_REMOVE, unit="record", n_records=1000,
        sampling_used="", data_touches=[], released=[], randomness="", utility={}, software={},
        created="", title="", **options,
    )  # fmt: skip
    assert verify(made) == []
    return made


@pytest.mark.parametrize(
    ("event", "price"),
    [
        (ev.BestOf(ev.Gaussian(9.0), 3.0), "exact"),
        pytest.param(
            ev.RandomAllocation(20, ev.Gaussian(9.0)), "upper bound", marks=pytest.mark.slow
        ),
        (ev.TruncatedPoissonSampled(0.01, 60, 1000, ev.Gaussian(2.0)), "exact"),
        (ev.Shuffled(ev.RandomizedResponse(0.5), 1000), "upper bound"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_every_certificate_of_records_has_a_price_for_groups(event, price):
    made = claim_of(event, groups=(2, 3))
    two, three = made["claim"]["groups"]
    assert made["claim"]["epsilon"] < two["epsilon"] < three["epsilon"]
    assert two["price"] == price


def test_the_stated_price_of_a_group_is_computed_again():
    made = claim_of(ev.Gaussian(9.0), groups=(2,))
    (true,) = made["claim"]["groups"]
    for group, is_fine in (
        (true, True),
        (true | {"epsilon": None}, False),
        (true | {"epsilon": 0.1}, False),
        ({"records": 2, "epsilon": true["epsilon"]}, False),  # does not say whether it is exact
    ):
        assert holds_with_group(made, group) == is_fine


def holds_with_group(made, group):
    edited = copy.deepcopy(made)
    edited["claim"]["groups"] = [group]
    edited.pop("seal")
    edited["seal"] = seal(edited)
    return verify(edited) == []


@pytest.mark.parametrize(("factor", "holds"), [(1.0, True), (1.01, True), (0.99, False)])
@pytest.mark.parametrize("price", ["upper bound", "exact"])
def test_a_bound_for_groups_holds_if_it_is_looser_than_the_one_known_now(price, factor, holds):
    by_price = {"upper bound": ev.Shuffled(ev.RandomizedResponse(0.5), 1000)}
    made = claim_of(by_price.get(price, ev.Gaussian(9.0)), groups=(2,))
    (group,) = made["claim"]["groups"]
    assert group["price"] == price
    stated = group | {"epsilon": factor * group["epsilon"]}
    assert holds_with_group(made, stated) == (holds if price == "upper bound" else factor == 1.0)

"""A certificate for a loop of one's own: it states what the run did, and others can check it."""

import json

import pytest
import torch
from typer.testing import CliRunner

import tacit
from tacit import events as ev
from tacit.cli import app
from tacit.report import certify, judge, new_key, sign, verify
from tacit.report.certificate import seal
from tacit.report.signature import AUTHENTICATED, CONSISTENT, INCOMPLETE, REFUTED
from tacit.training import Speed
from tacit.training.program.start import BY_CONSTRUCTION, ONE_AT_A_TIME

DELTA = 1e-5


def made(ledger, *, scale=1.0, **options):
    torch.manual_seed(0)
    x = torch.randn(40, 3) * scale
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {
        "batch_size": 10,
        "steps": 2,
        "clip_norm": 1.0,
        "noise_multiplier": 2.0,
        "speed": Speed(check=False),
    }
    private = tacit.make_private(
        model,
        optimizer,
        (x, x.sum(1)),
        lambda model, batch: (model(batch[0]).squeeze(1) - batch[1]) ** 2,
        ledger=ledger,
        users=range(40),  # epsilons for several records take seconds
        **settings | options,
    )
    return private, model


def trained(ledger, **options):
    private, model = made(ledger, **options)
    for batch in private:
        private.step(batch)
    return private, model


def test_the_claim_is_the_run_and_can_be_checked_signed_and_refuted(tmp_path):
    with tacit.Ledger(tmp_path / "clinic.ledger", tacit.Budget(9.0, DELTA), unit="user") as ledger:
        ledger.spend(ev.Laplace(2.0), note="a mean")
        private, model = trained(ledger)
        torch.save(model.state_dict(), tmp_path / "model.pt")
        file = tmp_path / "model.certificate.json"
        found = certify(private, file, title="x", delta=DELTA, model=tmp_path / "model.pt")
    assert found == json.loads(file.read_text())
    assert found["claim"]["epsilon"] == private.epsilon(delta=DELTA)
    assert found["claim"]["n_records_assumed_public"] == 40
    assert found["context"]["ledger"]["entries_of_run"] == [2]
    assert found["context"]["isolation"] == private.isolation == BY_CONSTRUCTION

    def call(*more):
        return CliRunner().invoke(app, ["verify", str(file), *map(str, more)]).exit_code

    ledger_file = tmp_path / "clinic.ledger"
    assert (call(), call("--ledger", ledger_file)) == (0, 0)
    new_key(tmp_path / "clinic.key")
    sign(file, tmp_path / "clinic.key", issuer="Clinic of X")
    assert judge(file, key=tmp_path / "clinic.key.pub", ledger=ledger_file).word == AUTHENTICATED
    with tacit.Ledger(tmp_path / "other.ledger") as other:
        other.spend(ev.Laplace(2.0))
    assert judge(file, ledger=tmp_path / "other.ledger").word == REFUTED
    (tmp_path / "model.pt").rename(tmp_path / "moved.pt")
    assert judge(file).word == INCOMPLETE


def test_lost_steps_that_were_paid_again_are_part_of_the_claim(tmp_path):
    with tacit.Ledger(tmp_path / "a.ledger", unit="user") as ledger:
        first, model = made(ledger)
        state = {"private": first.state_dict()} | {"model": model.state_dict()}
        for batch in first:
            first.step(batch)
        again, model = made(ledger, scale=2.0)  # other records
        with pytest.warns(UserWarning, match="They are paid"):
            again.load_state_dict(state["private"], lost_steps="pay")
        for batch in again:
            again.step(batch)
        found = certify(again, tmp_path / "c.json", title="x", delta=DELTA)
    step = ev.PoissonSampled(0.25, ev.Gaussian(2.0))
    assert found["claim"]["epsilon"] == pytest.approx(
        tacit.epsilon(ev.Repeated(step, 4), delta=DELTA)
    )
    assert len(found["context"]["ledger"]["entries_of_run"]) == 2
    assert judge(tmp_path / "c.json", ledger=tmp_path / "a.ledger").word == CONSISTENT
    claim = found["claim"] | {"events": ev.Repeated(step, 2).to_dict()}
    assert verify(found | {"claim": claim})  # the price of the plan alone does not pass


def test_only_the_two_statements_about_examples_verify(tmp_path):
    private, _ = trained(None)
    found = certify(private, tmp_path / "c.json", title="x", delta=DELTA)

    def problems(statement):
        body = found | {"context": found["context"] | {"isolation": statement}}
        del body["seal"]
        return [problem.field for problem in verify(body | {"seal": seal(body)})]

    for statement in (BY_CONSTRUCTION, ONE_AT_A_TIME, None):
        assert not problems(statement)
    for statement in ("checked: 16 lots", "strict", ""):
        assert problems(statement) == ["context.isolation"]


def test_a_run_without_a_guarantee_or_a_step_gets_no_certificate(tmp_path):
    private, _ = made(None)
    with pytest.raises(ValueError, match="taken no step"):
        certify(private, tmp_path / "c.json", title="x", delta=DELTA)
    private, _ = trained(None, noise_multiplier=0.0)
    with pytest.raises(ValueError, match="no guarantee"):
        certify(private, tmp_path / "c.json", title="x", delta=DELTA)
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ValueError, match="in the folder of the certificate"):
        certify(
            trained(None)[0],
            tmp_path / "c.json",
            title="x",
            delta=DELTA,
            model=tmp_path / "elsewhere" / "m.pt",
        )
    assert not list(tmp_path.glob("*.json"))


def test_a_ledger_in_memory_cannot_be_compared(tmp_path):
    private, _ = trained(None)
    found = certify(private, tmp_path / "c.json", title="x", delta=DELTA)
    assert (found["claim"]["unit"], found["context"]["ledger"]) == ("user", None)
    assert judge(tmp_path / "c.json").word == CONSISTENT
    with tacit.Ledger(tmp_path / "a.ledger"):
        pass
    assert judge(tmp_path / "c.json", ledger=tmp_path / "a.ledger").word == REFUTED

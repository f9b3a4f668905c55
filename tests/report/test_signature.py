"""Forgeries of a run folder: none verifies with a key; without one no single part passes."""

import copy
import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tacit.cli import app
from tacit.errors import LedgerError
from tacit.experiments import Facts, Recipe, RunFolder, file_hash, train
from tacit.report import check_run, judge, new_key, sign, verify_run, write_certificate, write_page
from tacit.report.certificate import seal
from tacit.report.signature import AUTHENTICATED, CONSISTENT, INCOMPLETE, REFUTED

RECIPE = "[training]\nbatch_size = 360\nepochs = 1\n[run]\nbaseline_steps = 0\n"
PARTS = ("model.safetensors", "recipe.toml", "run.ledger", "facts.json", "metrics.jsonl")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two signed runs that differ in epsilon, and the key that signed them."""
    root = tmp_path_factory.mktemp("made")
    new_key(root / "clinic.key")
    for name, epsilon in (("run", 3.0), ("other", 8.0)):
        recipe = Recipe.parse(RECIPE + f"[privacy]\nepsilon = {epsilon}\n")
        train(recipe, root / name)
        write_certificate(RunFolder(root / name))
        sign(root / name, root / "clinic.key", issuer="Clinic of X")
    return root


@pytest.fixture
def folder(made, tmp_path):
    shutil.copytree(made / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def key(made):
    return made / "clinic.key.pub"


@pytest.fixture
def unsigned(folder):
    """The same run with its certificate before it was signed."""
    (folder / "certificate.sig").unlink()
    (folder / "certificate.json").unlink()
    write_certificate(RunFolder(folder))
    return folder


def leaves(value, path=()):
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves(item, (*path, name))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path


def edited(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 0.9 + 1e-9
    if isinstance(value, str):
        return value[:-1] + ("0" if value[-1:] != "0" else "1")
    return "edited"


def changed(content, path):
    copied = copy.deepcopy(content)
    place = copied
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = edited(place[path[-1]])
    return copied


def sealed(certificate):
    body = {name: value for name, value in certificate.items() if name != "seal"}
    return body | {"seal": seal(body)}


def test_an_honest_run_is_authenticated_with_a_key_and_consistent_without(folder, key, unsigned):
    assert judge(unsigned).word == CONSISTENT
    assert judge(unsigned, key=key).word == REFUTED  # nobody vouches for it


def test_a_signed_run_is_authenticated_by_its_own_key_alone(folder, key, tmp_path):
    assert judge(folder, key=key).word == AUTHENTICATED
    assert judge(folder / "certificate.json", key=key).word == AUTHENTICATED
    assert judge(folder).word == CONSISTENT
    new_key(tmp_path / "mine.key")
    assert judge(folder, key=tmp_path / "mine.key.pub").word == REFUTED


def test_every_edited_field_of_the_certificate_is_found(folder, key, unsigned):
    stored = json.loads((unsigned / "certificate.json").read_text())
    paths = list(leaves(stored))
    assert len(paths) > 60
    derived = verify_fields(unsigned)
    for path in paths:
        if path == ("seal",):
            continue
        assert derived(sealed(changed(stored, path))), path


def verify_fields(folder: Path):
    """Return a function that compares a certificate with the one derived once from `folder`.

    It is what `verify_run` does after the parts of the folder were found to agree.
    """
    from tacit.report import run_certificate

    run = RunFolder(folder)
    assert check_run(run) == []
    derived = run_certificate.certificate_of(run.facts(), run)
    return lambda stored: list(run_certificate._differences(stored, derived))


def test_an_edited_certificate_sealed_again_is_found_by_the_command(unsigned):
    stored = json.loads((unsigned / "certificate.json").read_text())
    for path in (("claim", "n_records_assumed_public"), ("issuer",), ("context", "adversary")):
        forged = sealed(changed(stored, path))
        (unsigned / "certificate.json").write_text(json.dumps(forged))
        result = CliRunner().invoke(app, ["verify", str(unsigned)])
        assert result.exit_code == 1, path
        assert "holds" not in result.output


def test_no_edited_certificate_verifies_with_a_key(made, key, tmp_path):
    """Without the run folder: the signature alone has to find each edit."""
    stored = json.loads((made / "run" / "certificate.json").read_text())
    shutil.copy(made / "run" / "certificate.sig", tmp_path)
    file = tmp_path / "certificate.json"
    for path in leaves(stored):
        if path == ("seal",):
            continue
        file.write_text(json.dumps(sealed(changed(stored, path)), indent=2) + "\n")
        from tacit.report.signature import _public_key, _signer

        signer, wrong = _signer(
            tmp_path / "certificate.sig", file.read_text(), stored["issuer"], _public_key(key)
        )
        assert signer is None, path
        assert wrong


def test_a_certificate_file_alone_is_authenticated_or_refuted(made, key, tmp_path):
    for name in ("certificate.json", "certificate.sig", "model.safetensors"):
        shutil.copy(made / "run" / name, tmp_path)
    assert judge(tmp_path / "certificate.json", key=key).word == AUTHENTICATED
    text = (tmp_path / "certificate.json").read_text()
    (tmp_path / "certificate.json").write_text(text + " ")
    assert judge(tmp_path / "certificate.json", key=key).word == REFUTED


def test_a_run_is_checked_with_a_ledger_that_arrives_beside_it(made, folder, key, tmp_path):
    """The ledger of a data set is not in the folder; whoever gets the folder may get a copy."""
    ledger = (folder / "run.ledger").rename(tmp_path / "clinic.ledger")
    found = judge(folder, key=key)
    assert (found.word, found.problems, found.key is None) == (INCOMPLETE, [], False)
    assert [one.field for one in found.unchecked] == ["ledger"]
    assert judge(folder, key=key, ledger=ledger).word == AUTHENTICATED
    assert judge(folder, ledger=made / "other" / "run.ledger").word == REFUTED
    with pytest.raises(LedgerError, match="no ledger at"):
        judge(folder, ledger=tmp_path / "absent.ledger")
    (folder / "run.ledger").write_text(
        "tacit ledger on a server\npostgresql://nowhere.invalid/x#y\n"
    )
    assert judge(folder).word == INCOMPLETE  # a received folder does not choose whom to call
    (folder / "run.ledger").unlink()

    run = CliRunner().invoke(app, ["verify", str(folder)])
    assert run.exit_code == 2
    assert "incomplete: epsilon" in run.output
    assert "nothing was compared with it" in run.output
    run = CliRunner().invoke(app, ["verify", str(folder), "--json"])
    assert [one["field"] for one in json.loads(run.stdout)["unchecked"]] == ["ledger"]
    run = CliRunner().invoke(app, ["verify", str(folder), "--ledger", str(ledger)])
    assert run.exit_code == 0, run.output
    (folder / "facts.json").write_text(
        (folder / "facts.json").read_text().replace('"record"', '"person"')
    )
    assert judge(folder).word == REFUTED  # the rest is checked without the ledger too


@pytest.mark.parametrize("name", ["model.safetensors", "recipe.toml", "metrics.jsonl"])
def test_a_missing_file_is_no_contradiction(folder, name):
    (folder / name).unlink()
    assert judge(folder).word == INCOMPLETE


def test_a_certificate_without_its_model_is_incomplete(made, key, tmp_path):
    for name in ("certificate.json", "certificate.sig"):
        shutil.copy(made / "run" / name, tmp_path)
    assert judge(tmp_path / "certificate.json", key=key).word == INCOMPLETE
    run = CliRunner().invoke(app, ["verify", str(tmp_path / "certificate.json")])
    assert (run.exit_code, "model.safetensors does not exist" in run.output) == (2, True)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_another_run_is_found(made, folder, key, name):
    shutil.copy(made / "other" / name, folder / name)
    for file in (folder / f"{name}-wal", folder / f"{name}-shm"):
        file.unlink(missing_ok=True)
    assert judge(folder).word == REFUTED
    assert judge(folder, key=key).word == REFUTED


@pytest.mark.parametrize("names", [("certificate.json",), ("certificate.json", "certificate.sig")])
def test_a_certificate_of_another_run_is_found(made, folder, key, names):
    for name in names:
        shutil.copy(made / "other" / name, folder / name)
    assert judge(folder).word == REFUTED
    assert judge(folder, key=key).word == REFUTED


def test_every_edited_field_of_the_facts_is_found(unsigned):
    run = RunFolder(unsigned)
    stored = json.loads((unsigned / "facts.json").read_text())
    given = run.facts()
    with run.reopen_ledger(given, read_only=True) as ledger:
        sealed_rows = {head: json.loads(note) for _, head, note in ledger.seals()}
    from tacit.experiments import seal_of

    found = 0
    for path in leaves(stored):
        if path[-1] == "version":
            continue
        try:
            facts = Facts.from_dict(changed(stored, path))
        except ValueError:
            found += 1
            continue
        assert sealed_rows.get(facts.ledger_head) != seal_of(facts), path
        found += 1
    assert found > 60


@pytest.mark.slow
def test_every_edited_field_of_the_facts_is_found_by_the_command(unsigned):
    stored = json.loads((unsigned / "facts.json").read_text())
    for path in leaves(stored):
        (unsigned / "facts.json").write_text(json.dumps(changed(stored, path)))
        assert judge(unsigned).word == REFUTED, path


@pytest.mark.slow
def test_every_edited_field_of_the_certificate_is_found_by_the_command(unsigned):
    stored = json.loads((unsigned / "certificate.json").read_text())
    for path in leaves(stored):
        if path != ("seal",):
            (unsigned / "certificate.json").write_text(json.dumps(sealed(changed(stored, path))))
            assert judge(unsigned).word == REFUTED, path


@pytest.mark.parametrize("version", [1, 3, None])
def test_facts_cannot_claim_another_version(unsigned, version):
    stored = json.loads((unsigned / "facts.json").read_text())
    (unsigned / "facts.json").write_text(json.dumps(stored | {"version": version}))
    found = judge(unsigned)
    assert found.word == REFUTED
    assert f"facts must be of format 2, got {version}" in found.problems[0].what


def test_a_certificate_of_another_format_is_refused_and_named(unsigned):
    stored = json.loads((unsigned / "certificate.json").read_text())
    (unsigned / "certificate.json").write_text(json.dumps(sealed(stored | {"version": 1})))
    found = judge(unsigned)
    assert found.word == REFUTED
    assert [one.field for one in found.problems] == ["version"]
    assert "2 was expected" in found.problems[0].what


def test_a_consistent_rewrite_of_everything_is_not_authenticated(made, folder, key):
    """The forger trains the same recipe with other data or noise, and writes every file anew."""
    shutil.rmtree(folder)
    train(Recipe.parse(RECIPE), folder)
    write_certificate(RunFolder(folder))
    assert judge(folder).word == CONSISTENT
    assert judge(folder, key=key).word == REFUTED
    shutil.copy(made / "run" / "certificate.sig", folder)
    assert judge(folder, key=key).word == REFUTED
    assert judge(folder).word == REFUTED  # a signature that belongs to another certificate


def test_report_and_audit_refuse_to_vouch_for_another_model(made, unsigned):
    before = (unsigned / "certificate.json").read_bytes()
    shutil.copy(made / "other" / "model.safetensors", unsigned / "model.safetensors")
    for verb in ("report", "audit"):
        result = CliRunner().invoke(app, [verb, str(unsigned)])
        assert result.exit_code == 2
        assert "its parts disagree: model.safetensors" in result.output
    assert (unsigned / "certificate.json").read_bytes() == before
    assert not (unsigned / "audit.json").exists()


def test_a_report_keeps_a_signature_that_still_holds_and_removes_one_that_does_not(folder, key):
    write_page(folder)
    assert judge(folder, key=key).word == AUTHENTICATED
    facts = json.loads((folder / "facts.json").read_text())
    audit = {"passes": True, "bounds": [], "tests": [], "model_sha256": facts["model_sha256"]}
    (folder / "audit.json").write_text(json.dumps(audit))
    assert judge(folder, key=key).word == REFUTED  # the certificate says nothing of this audit
    with pytest.warns(UserWarning, match="was removed. Sign it again: tacit sign"):
        page = write_page(folder)
    assert "there are no lower bounds on epsilon" in page.read_text()  # this audit has none
    assert not (folder / "certificate.sig").exists()
    certificate = json.loads((folder / "certificate.json").read_text())
    assert certificate["context"]["audit"] == {
        "sha256": file_hash(folder / "audit.json"),
        "passes": True,
    }
    assert certificate["issuer"] is None


@pytest.mark.parametrize("stated", ["of another run", "", None])
def test_an_audit_of_another_run_gets_no_certificate(unsigned, stated):
    audit = {"passes": True, "bounds": [], "tests": [], "model_sha256": stated}
    (unsigned / "audit.json").write_text(json.dumps(audit))
    (unsigned / "certificate.json").unlink()
    with pytest.raises(ValueError, match=r"audit\.json: is not an audit of this model"):
        write_certificate(RunFolder(unsigned))
    assert judge_problems(unsigned) == {"audit.json", "certificate.json"}


def judge_problems(folder):
    return {problem.field for problem in verify_run(folder)}


@pytest.mark.parametrize("name", ["certificate.json", "facts.json", "recipe.toml", "audit.json"])
def test_a_pipe_or_a_device_in_place_of_a_file_is_not_waited_for(unsigned, name):
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        (unsigned / name).unlink(missing_ok=True)
        make(unsigned / name)
        result = CliRunner().invoke(app, ["verify", str(unsigned), "--seconds", "20"])
        if name != "audit.json":  # a run need not have one
            assert result.exit_code in (1, 2)
        assert isinstance(result.exception, SystemExit | None)
        assert "took longer" not in result.output


def test_nothing_that_does_not_verify_is_signed(made, folder):
    shutil.copy(made / "other" / "recipe.toml", folder / "recipe.toml")
    with pytest.raises(ValueError, match="is not signed, because"):
        sign(folder, made / "clinic.key", issuer="Clinic of X")


def test_keys_are_files_of_their_own(tmp_path):
    new_key(tmp_path / "a.key")
    assert (tmp_path / "a.key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        new_key(tmp_path / "a.key")
    (tmp_path / "bad").write_text("no key")
    for arguments in (
        ["sign", ".", "--key", "bad", "--issuer", "x"],
        ["verify", ".", "--key", "bad"],
    ):
        assert CliRunner().invoke(app, arguments).exit_code == 2


def test_keys_of_ssh_are_read(made, folder, tmp_path):
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private, ssh = Ed25519PrivateKey.generate(), serialization.Encoding.OpenSSH
    (tmp_path / "id").write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
    )
    public = private.public_key().public_bytes(ssh, serialization.PublicFormat.OpenSSH)
    (tmp_path / "id.pub").write_bytes(public + b" me@here\n")
    sign(folder, tmp_path / "id", issuer="me")
    assert judge(folder, key=tmp_path / "id.pub").word == AUTHENTICATED


def test_a_folder_without_facts_is_no_run(unsigned):
    """Else whoever removes the facts could edit the certificate and seal it again."""
    (unsigned / "facts.json").unlink()
    assert judge(unsigned).word == REFUTED
    assert judge(unsigned / "certificate.json").word == CONSISTENT  # the file alone

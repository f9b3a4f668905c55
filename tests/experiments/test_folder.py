"""The run folder: whole files only, and no run under another recipe."""

import pytest

from tacit.experiments import Recipe, RunFolder
from tacit.experiments.folder import write_whole


def test_a_file_that_cannot_be_replaced_keeps_its_content_and_leaves_nothing(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write("metrics.jsonl", "old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        folder.write("metrics.jsonl", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text() == "old"


def test_a_secret_file_is_readable_by_its_owner_alone(tmp_path):
    assert write_whole(tmp_path / "key", b"k", mode=0o600).stat().st_mode & 0o077 == 0


def test_a_folder_is_empty_until_a_file_is_complete(tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert folder.is_empty
    folder.path.mkdir()
    (folder / ".recipe.toml.x.part").write_text("half")
    assert folder.is_empty
    folder.close()
    assert not list(folder.path.iterdir())
    folder.write("recipe.toml", "")
    assert not folder.is_empty


def test_recipes_are_compared_by_their_settings_not_their_text(tmp_path):
    folder, recipe = RunFolder(tmp_path), Recipe.read("digits")
    folder.refuse_other_recipe(recipe, resume="")  # the folder holds none
    folder.write("recipe.toml", "# written by hand\n" + recipe.to_toml().replace(" = ", "="))
    folder.refuse_other_recipe(recipe, resume="")
    other = recipe.with_settings({"training.epochs": 1})
    with pytest.raises(ValueError, match=r"another recipe.*as it was planned: tacit train"):
        folder.refuse_other_recipe(other, resume="tacit train")


def test_a_folder_without_facts_holds_no_finished_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="no finished run"):
        RunFolder(tmp_path).facts()

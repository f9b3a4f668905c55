"""CSV files: one line is one record, and no error quotes a value."""

import gzip
from collections import Counter

import numpy as np
import pytest

from tacit.datasets import Dialect, Schema, column_names, read_columns, read_rows

SCHEMA = Schema({"id": [0, 1000], "kind": ["a", "b", "a,1"], "y": [0, 1]}, target="y")
HEADER = "id,kind,y"
SECRET = "Jane Doe HIV+"


def rows_of(tmp_path, lines, schema=SCHEMA, header=HEADER):
    path = tmp_path / "t.csv"
    path.write_bytes("\n".join([header, *lines]).encode("latin-1") + b"\n")
    return read_rows(path, schema)


GOOD = [f"{k},{'ab'[k % 2]},{k % 3 / 2}" for k in range(50)]


@pytest.mark.parametrize(
    "added",
    ['5,"a,1', '"', "1,2,3,4,5", "only", ",,", "\xe9\xff,a,1", '5,"a,1",1', "\x0c", "\0,\0"],
)  # fmt: skip
@pytest.mark.parametrize("place", [0, 20, 50])
def test_one_line_changes_one_record(tmp_path, added, place):
    plain = rows_of(tmp_path, GOOD)
    more = rows_of(tmp_path, GOOD[:place] + [added] + GOOD[place:])
    if len(more.x) == len(plain.x):  # a blank line is no record
        assert added.isspace()
        return
    assert len(more.x) == len(plain.x) + 1
    for name in ("x", "y", "flags"):
        assert np.array_equal(np.delete(getattr(more, name), place, 0), getattr(plain, name))


DIALECTS = [{}, {"quote": ""}, {"quote": "'"}, {"encoding": "cp1252"}, {"encoding": "latin-1"},
            {"header": False}, {"separator": ";", "decimal": ","}, {"separator": "\t"}]  # fmt: skip
PIECES = [b"1", b"a", b"0.5", b'"', b'""', b"'", b",", b";", b"\t", b" ", b"\r", b"\0", b"\\",
          b"\x1a", b"\xff", b"\xc3", b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"\x0b", b"\x85", b"NA",
          b"a,1", b'"a,1"', b"nan", b"inf", b"-0.0", b"1e999", b"9" * 5000, b"a" * 140_000, b"#",
          b"id,kind,y"]  # fmt: skip


def written(tmp_path, lines, dialect):
    header = [b"id,kind,y".replace(b",", dialect.get("separator", ",").encode())]
    path = tmp_path / "t.csv"
    path.write_bytes(b"\n".join((header if dialect.get("header", True) else []) + lines) + b"\n")
    names = ("id", "kind", "y") if dialect.get("header", True) else ("c1", "c2", "c3")
    columns = dict(zip(names, ([0, 1000], ["a", "b", "a,1"], [0, 1]), strict=True))
    schema = Schema(columns, target=list(columns)[2], file=dialect)
    rows, plain = read_rows(path, schema), read_columns(path, schema)
    values = zip(*plain.values(), strict=True)
    return Counter(
        (x.tobytes(), y.tobytes(), flags.tobytes(), repr(value))
        for x, y, flags, value in zip(rows.x, rows.y, rows.flags, values, strict=True)
    )


@pytest.mark.parametrize("n_pairs", [5, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dialect", DIALECTS, ids=str)
def test_any_line_that_is_added_removed_or_replaced_changes_one_record(tmp_path, dialect, n_pairs):
    rng = np.random.default_rng(len(str(dialect)))
    sign = dialect.get("separator", ",").encode()

    def line():
        pieces = [PIECES[k] for k in rng.integers(len(PIECES), size=rng.integers(1, 8))]
        return sign.join(pieces) if rng.random() < 0.5 else b"".join(pieces)

    good = [text.encode().replace(b",", sign) for text in GOOD]
    for _ in range(n_pairs):
        lines = good[:1] + [line() if rng.random() < 0.3 else one for one in good[1:]]
        before = written(tmp_path, lines, dialect)
        place = 1 + int(rng.integers(len(lines) - 1))
        more = written(tmp_path, [*lines[:place], line(), *lines[place:]], dialect)
        assert (more - before).total() <= 1
        assert (before - more).total() == 0
        less = written(tmp_path, lines[:place] + lines[place + 1 :], dialect)
        assert (before - less).total() <= 1
        assert (less - before).total() == 0
        other = written(tmp_path, [*lines[:place], line(), *lines[place + 1 :]], dialect)
        assert max((other - before).total(), (before - other).total()) <= 1


def test_a_quoted_separator_is_part_of_the_field(tmp_path):
    rows = rows_of(tmp_path, ['5,"a,1",1'])
    assert rows.x[0, 1:].tolist() == [0, 0, 1]
    assert not rows.flags.any()


def test_lines_with_other_numbers_of_fields_are_flagged(tmp_path):
    rows = rows_of(tmp_path, ["1,a,0", "1,a", "1;a;0"])
    assert rows.flags[:, 0].tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (b"id;kind;y\n1;a;0\n", {}, "no comma but a semicolon: set separator"),
        (b"id,kind\n1,a\n", {}, "has no column 'y'"),
        (b"id,kindd,y\n1,a,0\n", {}, "Did you mean 'kindd'"),
        (b"id,kind,y\n", {}, "no records"),
        (b"id,kind,y", {}, "no records"),
        (b"", {}, "is empty"),
        (b"\n\n\n", {}, "is empty"),
        (b"\n\nid,kind,y\n1,a,0\n", {}, "first line of t.csv is empty. Set skip_lines"),
        (b"id,kind,y,id\n1,a,0,2\n", {}, "fields 1 and 4 are equal"),
        (b"id,,kind,y\n1,2,a,0\n", {}, "field 2 is empty"),
        (b"id,2012,kind,y\n1,2,a,0\n", {}, "field 2 is a number"),
        (b"id,kind,y\r1,a,0\r", {}, "end of a line as old systems write it"),
        (b"1,a,0\n2,b,1\n", {}, "does not look like names"),
        (b"1,a,0\n2,b,1\n", {"header": False, "names": ["id", "kind"]}, "2 columns.* 3 fields"),
        ("id,kind,y,é\n1,a,0,x\n".encode("latin-1"), {}, "header .* not written in utf-8"),
        ("id,kind,y\n1,a,0\n".encode("utf-16"), {}, "no CSV file"),
        (b'id,"kind,y\n1,a,0\n', {}, "quote that is not closed"),
        (b"id,kind,y,y\n1,a,0,0\n", {}, "does not look like names"),
        (b"\x00\x01\x02\n", {}, "no CSV file"),
    ],
)
def test_a_wrong_file_is_stopped_by_one_sentence_without_values(
    tmp_path, content, settings, message
):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    schema = Schema(SCHEMA.columns, target="y", file=settings)
    with pytest.raises(ValueError, match=message) as stopped:
        read_rows(path, schema)
    assert "\n" not in str(stopped.value)


@pytest.mark.parametrize("name", ["t.csv.gz", "t.csv.xz", "t.csv.bz2", "t.parquet"])
def test_damaged_files_are_stopped_by_one_sentence(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(f"{HEADER}\n{SECRET}\n".encode() * 9)[:-9] + b"Jane")
    with pytest.raises(ValueError, match=r"damaged|no Parquet") as stopped:
        read_rows(path, SCHEMA)
    assert "Jane" not in str(stopped.value)


@pytest.mark.parametrize("form", ['"",id,kind,y', "id,kind,y,", ",id,kind,y,"])
def test_empty_names_at_the_ends_of_a_header_are_places(tmp_path, form):
    places = ["row" if not name.strip('"') else name for name in form.split(",")]
    line = ",".join({"row": "7", "id": "5", "kind": "b", "y": "1"}[name] for name in places)
    rows = rows_of(tmp_path, [line], header=form)
    assert rows.x[0, 1:].tolist() == [0, 1, 0]
    assert not rows.flags.any()
    names = column_names(tmp_path / "t.csv", Dialect())
    assert [name for name in names if name in ("c1", "c4", "c5")]


def test_files_without_a_header_and_with_other_signs(tmp_path):
    path = tmp_path / "adult.data"
    path.write_text("|a comment\n39; x ; 2,5\n50; ?; 3\n\n")
    dialect = {"separator": ";", "decimal": ",", "header": False, "skip_lines": 1}
    assert list(column_names(path, Dialect.from_dict(dialect))) == ["c1", "c2", "c3"]
    schema = Schema({"c1": [0, 100], "c3": [0, 5], "c2": ["x"]}, file=dialect)
    assert read_rows(path, schema, training=False).x.tolist() == [
        [pytest.approx(-0.22), 0.0, 1.0],
        [0.0, pytest.approx(0.2), 0.0],
    ]


def test_one_record_of_each_person_is_kept(tmp_path):
    schema = Schema({"id": "person", "y": [0, 1], "kind": ["a", "b"]}, target="y")
    rows = rows_of(tmp_path, ["7,a,0", "8,b,1", "7,b,1", ",a,0", ",b,1"], schema)
    assert rows.persons == ("7", "8")
    assert rows.x.tolist() == [[1, 0], [0, 1]]
    assert schema.unit == "person"

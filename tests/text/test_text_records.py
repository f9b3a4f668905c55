"""Files become token sequences that belong to one unit of privacy each."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest

from tacit.experiments import TextSettings
from tacit.text.text_records import IGNORED, Packing, Text, load_records, read_texts


class Words:
    """A tokenizer with one token a word, numbered as they come: enough to see where tokens go."""

    pad_token_id, bos_token_id, eos_token_id, cls_token_id = 0, 1, 2, None

    def __init__(self):
        self.numbers = {}

    def __call__(self, text, *, add_special_tokens):
        assert not add_special_tokens
        ids = [self.numbers.setdefault(word, 3 + len(self.numbers)) for word in text.split()]
        return {"input_ids": ids}


def packing(*, is_causal=True, **settings):
    return Packing(Words(), TextSettings(**settings), is_causal)


def test_a_sequence_holds_the_text_of_one_person():
    own = packing(person="who", length=6, sequences_per_person=2)
    texts = [Text(f"w{i}a w{i}b", person=f"p{i % 3}") for i in range(9)]
    found = own.sequences(texts)
    owner = {number: word[1] for word, number in own.tokenizer.numbers.items()}  # w0a: text 0
    for ids, targets, unit in zip(*found, strict=True):
        held = {f"p{int(owner[i]) % 3}" for i in ids if i in owner}
        assert held == {unit}  # texts 0, 3, 6 are those of p0
        assert all(t in (IGNORED, i) for i, t in zip(ids, targets, strict=True))
    assert len(found.units) == 6  # 12 tokens each, in sequences of 6


def test_what_does_not_fit_is_left_out_and_other_persons_do_not_matter():
    own = packing(person="who", length=4, sequences_per_person=1)
    texts = [Text("a b c d e f", person="x"), Text("g h", person="y")]
    whole = own.sequences(texts)
    assert whole.units == ("x", "y")
    alone = packing(person="who", length=4, sequences_per_person=1).sequences(texts[:1])
    np.testing.assert_array_equal(whole.ids[0], alone.ids[0])


def test_a_record_is_one_sequence_and_its_prompt_has_no_loss():
    found = packing(length=8, prompt="mr").sequences([Text("yes no", prompt="why not")])
    assert found.ids.tolist() == [[1, 3, 4, 5, 6, 2, 0, 0]]
    assert found.targets.tolist() == [[IGNORED] * 3 + [5, 6, 2] + [IGNORED] * 2]


def test_classification_keeps_the_end_token_and_undeclared_classes_raise_nothing():
    own = packing(is_causal=False, length=4, classes=("no", "yes"))
    found = own.sequences([Text("a b c d e", label="yes"), Text("a", label="?")])
    assert found.ids.tolist() == [[1, 3, 4, 2], [1, 3, 2, 0]]
    assert found.targets.tolist() == [1, IGNORED]


@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.jsonl", "x.txt", "x.csv.gz"])
def test_files_of_every_format_hold_the_same_texts(tmp_path, name):
    rows = ["one, two", "three"]
    lines = {
        "csv": ["text", '"one, two"', "three"],
        "tsv": ["text", *rows],
        "jsonl": [json.dumps({"text": row}) for row in rows],
        "txt": rows,
    }[name.removesuffix(".gz").partition(".")[2]]
    content = "\n".join(lines).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert [t.text for t in read_texts(tmp_path / name, TextSettings(), has_label=False)] == rows


def test_errors_name_columns_and_files_only(tmp_path):
    (tmp_path / "x.csv").write_text("body\nsecret\n")
    with pytest.raises(ValueError, match=r"x\.csv has no column 'text'") as error:
        read_texts(tmp_path / "x.csv", TextSettings(), has_label=False)
    assert "secret" not in str(error.value)
    with pytest.raises(ValueError, match="must end with one of"):
        read_texts(_touched(tmp_path / "x.xml"), TextSettings(), has_label=False)
    with pytest.raises(ValueError, match="there is no text file"):
        read_texts(tmp_path / "y.csv", TextSettings(), has_label=False)


def _touched(path):
    path.touch()
    return path


def test_a_paid_evaluation_holds_whole_persons_out(tmp_path):
    rows = [f"text {i}\tp{i % 10}" for i in range(40)]
    (tmp_path / "x.tsv").write_text("\n".join(["text\twho", *rows]))
    settings = TextSettings(path="x.tsv", person="who", evaluation="paid", test_share=0.3)
    own = packing(person="who")
    found = load_records(settings, replace(own, settings=settings), root=tmp_path)
    assert found.persons is not None
    assert (found.n_records, found.n_held_out, found.is_test_public) == (7, 3, False)
    assert {found.persons.ids.count(person) for person in found.persons.ids} == {1}  # one sequence


@pytest.mark.parametrize("person", ["", "who"])
def test_an_added_record_moves_no_other_between_training_and_test(tmp_path, person):
    rows = [f"text {i}\tp{i % 10}" for i in range(40)]
    own = {"evaluation": "paid", "test_share": 0.3, "length": 8, "person": person}
    parts, words = [], packing()
    for name, lines in (("a", rows), ("b", ["new one\tp99", *rows])):
        (tmp_path / f"{name}.tsv").write_text("\n".join(["text\twho", *lines]))
        settings = TextSettings(path=f"{name}.tsv", **own)
        found = load_records(settings, replace(words, settings=settings), root=tmp_path)
        parts.append([{*map(tuple, x.tolist())} for x in (found.x_train, found.x_test)])
    (train, test), (train_b, test_b) = parts
    assert train
    assert test
    assert len(train ^ train_b) + len(test ^ test_b) == 1


def test_a_text_of_an_undeclared_class_is_not_learned(tmp_path):
    (tmp_path / "x.tsv").write_text("text\tlabel\ngood\t1\nbad\tO\n")
    settings = TextSettings(path="x.tsv", classes=("0", "1"))
    own = replace(packing(), settings=settings, is_causal=False)
    assert load_records(settings, own, root=tmp_path).y_train.tolist() == [1, IGNORED]


def test_canaries_are_records_of_their_own(tmp_path):
    (tmp_path / "x.txt").write_text("a b\nc d\n")
    settings = TextSettings(path="x.txt")
    found = load_records(settings, packing(), root=tmp_path, canaries=["s e", "s e"])
    assert found.n_records == 4


SECRET = "zebrafish"


def read(folder, name, content, **options):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    settings = TextSettings(**options)
    return read_texts(folder / name, settings, has_label=False)


@pytest.mark.parametrize("kind", ["txt", "tsv", "jsonl"])
@pytest.mark.parametrize("mark", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\r"])
def test_a_line_is_one_record_whatever_is_in_it(tmp_path, kind, mark):
    """Two records made of one would be two lots of influence at the price of one."""
    text = f"one{mark}two"
    lines = {"txt": [text, "three"], "tsv": ["text", text, "three"]}
    lines["jsonl"] = [json.dumps({"text": t}, ensure_ascii=False) for t in (text, "three")]
    found = read(tmp_path, f"x.{kind}", "\r\n".join(lines[kind]))
    assert [t.text for t in found] == [text, "three"]


def test_a_quoted_cell_may_go_over_lines(tmp_path):
    found = read(tmp_path, "x.csv", 'text\r\n"one\r\ntwo"\r\n\r\nthree\r\n')
    assert [t.text for t in found] == ["one\r\ntwo", "three"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", f'text\na\n"{SECRET}', "quote is not closed"),
        ("x.csv", f'text\n"a" {SECRET}\n', "quote is not closed"),
        ("x.csv", f"text\ra\r{SECRET}\r", "carriage return alone"),
        ("x.csv", f"text,text\na,{SECRET}\n", "more than one column 'text'"),
        ("x.tsv", f"text\ttext\na\t{SECRET}\n", "more than one column 'text'"),
        ("x.csv", "body\n", "no column 'text'"),
        ("x.tsv", f"{SECRET}\n".encode("utf-16"), "is not text in UTF-8"),
        ("x.txt", b"a\0b", "is not text in UTF-8"),
        ("x.txt.gz", SECRET.encode(), "no whole .gz file"),
        ("x.txt.gz", gzip.compress(SECRET.encode() * 99, mtime=0)[:-9], "no whole .gz file"),
        ("x.jsonl", f'{{"text": "{SECRET}', "must be one JSON object"),
        ("x.jsonl", f'["{SECRET}"]', "must be one JSON object"),
        ("x.jsonl", "[" * 99_999, "must be one JSON object"),
        ("x.jsonl", f'{{"body": "{SECRET}"}}', "no column 'text'"),
        ("x.jsonl", f'{{"text": ["{SECRET}"]}}', "must hold texts or numbers"),
    ],
)
def test_a_file_of_another_form_is_refused_in_one_sentence(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message) as refusal:
        read(tmp_path, name, content)
    assert SECRET not in str(refusal.value)
    assert refusal.value.__cause__ is None


def test_private_bytes_and_signs_that_no_tokenizer_takes_are_replaced(tmp_path):
    """An error would reveal that a record has them."""
    assert read(tmp_path, "x.tsv", b"\xef\xbb\xbftext\ncaf\xe9\n")[0].text == "caf\ufffd"
    found = read(tmp_path, "x.jsonl", '{"text": "a\\ud800b\\u0000c"}')
    assert found[0].text == "a?b\ufffdc"
    (tmp_path / "x.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match="is not text in UTF-8"):
        read_texts(tmp_path / "x.txt", TextSettings(), has_label=False, is_public=True)


def test_equal_numbers_are_one_person_and_mixed_ids_are_refused(tmp_path):
    rows = '{"text": "a", "who": 1}\n{"text": "b", "who": 1.0}\n{"text": "c", "who": 2}'
    found = read(tmp_path, "x.jsonl", rows, person="who")
    assert [t.person for t in found] == ["1", "1", "2"]
    with pytest.raises(ValueError, match="must hold ids of one type"):
        read(tmp_path, "y.jsonl", rows + '\n{"text": "d", "who": "1"}', person="who")


@pytest.mark.parametrize("missing", ["null", '""', "NaN"])
def test_a_text_of_nobody_is_left_out(tmp_path, missing):
    """It could be anybody's, so it belongs to no unit."""
    content = f'{{"text": "a", "who": "p"}}\n{{"text": "b", "who": {missing}}}'
    assert [t.text for t in read(tmp_path, "x.jsonl", content, person="who")] == ["a"]
    nobody = f'{{"text": "b", "who": {missing}}}'
    (tmp_path / "z.jsonl").write_text(nobody)
    settings = TextSettings(path="z.jsonl", person="who")
    with pytest.raises(ValueError, match="holds no texts of a person"):
        load_records(settings, replace(packing(), settings=settings), root=tmp_path)


def test_no_person_can_be_a_canary(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "a", "who": "\0canary 0"}))
    settings = TextSettings(path="x.jsonl", person="who")
    own = replace(packing(), settings=settings)
    found = load_records(settings, own, root=tmp_path, canaries=["s"])
    assert found.persons is not None
    assert len(set(found.persons.ids)) == found.n_records == 2


@pytest.mark.parametrize("classes", [("0", "1"), ("no", "yes")])
def test_a_saved_folder_of_datasets_holds_the_same_texts(tmp_path, classes):
    datasets = pytest.importorskip("datasets", reason="pip install 'tacit-dp[text]'")
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "other": datasets.Value("int64"),
        }
    )
    rows = {"text": ["a", None, "c"], "label": [0, 1, 1], "other": [1, 2, 3]}
    saved = datasets.Dataset.from_dict(rows, features=features)
    saved.save_to_disk(tmp_path / "one")
    settings = TextSettings(classes=classes)
    found = read_texts(tmp_path / "one", settings, has_label=True)
    assert [t.text for t in found] == ["a", "", "c"]
    assert [t.label for t in found] == [classes[0], classes[1], classes[1]]
    with pytest.raises(ValueError, match="no column 'body'"):
        read_texts(tmp_path / "one", TextSettings(text="body"), has_label=True)
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "two")
    with pytest.raises(ValueError, match=r"several data sets.*\(train, test\)"):
        read_texts(tmp_path / "two", settings, has_label=True)
    with pytest.raises(ValueError, match="holds no data set"):
        read_texts(tmp_path, settings, has_label=True)

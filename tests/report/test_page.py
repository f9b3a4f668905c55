"""The page is complete, escaped and self-contained, and warns about weak claims."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from tacit.cli import app
from tacit.report import verify, write_page
from tacit.report.page import cautions, promise, strength


class Balanced(HTMLParser):
    """Fails if a tag is closed out of order."""

    void = frozenset(
        {"meta", "link", "img", "br", "circle", "line", "polyline", "polygon", "input"}
    )

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        """Ignore an element that closes itself."""

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_run_becomes_a_page_a_certificate_and_csv_files(run):
    page = write_page(run.path)
    text = page.read_text(encoding="utf-8")
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert text.count("<svg") == 3
    certificate = json.loads((run / "certificate.json").read_text())
    assert verify(certificate, folder=run.path) == []
    assert f"{certificate['claim']['epsilon']:.3f}" in text
    assert (run / "figures/accuracy-by-epoch.csv").read_text().count("\n") == 21


def test_the_page_needs_no_network(run):
    text = write_page(run.path).read_text(encoding="utf-8")
    assert re.findall(r'(?:src|href)="(?!data:|#|figures/)', text) == []
    assert "@import" not in text


def test_texts_are_escaped(run):
    text = write_page(run.path).read_text(encoding="utf-8")
    assert "<digits>" not in text
    assert "&lt;digits&gt; &amp; friends" in text


def test_the_key_of_the_noise_is_not_on_the_page(run):
    run.write("secret/checkpoint.json", '{"key": "deadbeef"}')
    assert "deadbeef" not in write_page(run.path).read_text(encoding="utf-8")


def test_weak_claims_raise_warnings():
    found = cautions(
        epsilon=12.0,
        delta=1e-2,
        n_records=1000,
        is_reproducible=True,
        is_shuffled=True,
        not_covered=["a scaler"],
    )
    assert len(found) == 5
    assert cautions(
        epsilon=math.inf, delta=1e-9, n_records=10, is_reproducible=False, is_shuffled=False
    )[0].startswith("Not private")


@pytest.mark.parametrize(("epsilon", "word"), [(0.5, "strong"), (3, "reasonable"), (11, "weak")])
def test_tiers_follow_the_guide(epsilon, word):
    assert strength(epsilon).startswith(word)


def test_the_promise_is_a_number_for_one_person():
    assert "73.2 % certain" in promise(1.0, 1e-5, "record")[1]
    assert "Nothing" in promise(math.inf, 1e-5, "record")[0]
    assert "e^" in promise(500.0, 1e-5, "record")[0]


def test_the_command_line_reports_and_verifies(run):
    runner = CliRunner()
    assert runner.invoke(app, ["report", str(run.path)]).exit_code == 0
    certificate = run / "certificate.json"
    assert runner.invoke(app, ["verify", str(certificate)]).exit_code == 0
    forged = json.loads(certificate.read_text())
    forged["claim"]["delta"] = 1e-6
    certificate.write_text(json.dumps(forged))
    failed = runner.invoke(app, ["verify", str(certificate), "--json"])
    assert failed.exit_code == 1
    assert json.loads(failed.stdout)["verdict"] == "does not verify"
    certificate.write_text("no json")
    assert runner.invoke(app, ["verify", str(certificate)]).exit_code == 1


def test_the_error_of_an_unfinished_run_names_the_next_command(tmp_path):
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert "tacit train" in result.output

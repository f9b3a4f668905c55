"""The example server and client work together, and the page's examples run."""

import doctest
import importlib.util
import json
import re
import threading
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def server():
    running = load("local_server").serve(["bus", "car", "bicycle"], 2.0, port=0)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    thread.join()
    running.server_close()


def test_clients_report_and_the_server_estimates(server):
    client = load("local_client")
    counts = [client.send(server, answer, most=2.0) for answer in ["bus"] * 30 + ["car"] * 10]
    assert counts == list(range(1, 41))
    with urlopen(f"{server}/estimate", timeout=10) as reply:
        found = json.load(reply)
    assert sum(value for value, _ in found.values()) == pytest.approx(1)
    value, error = found["bus"]
    assert abs(value - 0.75) < 5 * error  # fails with probability below 1e-6


def test_a_client_refuses_too_large_an_epsilon(server):
    with pytest.raises(SystemExit, match="nothing was sent"):
        load("local_client").send(server, "bus", most=1.0)


@pytest.mark.parametrize("body", [b"7", b"-1", b'"bus"', b"true", b"not json"])
def test_the_server_refuses_what_is_no_report(server, body):
    with pytest.raises(HTTPError) as caught:
        urlopen(Request(f"{server}/report", data=body, method="POST"), timeout=10)
    assert caught.value.code == 400
    caught.value.close()


def test_the_examples_of_the_page_run():
    page = (ROOT / "docs" / "local.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    test = doctest.DocTestParser().get_doctest(blocks, {}, "local.md", "local.md", 0)
    assert len(test.examples) > 15
    failures: list[str] = []
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    doctest.DocTestRunner(optionflags=options).run(test, out=failures.append)
    assert not failures, "".join(failures)


def test_the_files_that_the_page_shows_exist():
    page = (ROOT / "docs" / "local.md").read_text(encoding="utf-8")
    for path in re.findall(r"\]\(((?!http)[^)#]+)\)", page):
        assert (ROOT / "docs" / path).is_file(), path

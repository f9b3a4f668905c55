"""The package stays easy to navigate: names, doors, depth, and one body for each formula."""

import ast
import re

import pytest
import structure

# Names that may occur twice, because folder and name together are the noun.
FILES_TWICE = {
    "linear": ["regression/linear.py", "training/gradients/linear.py"],
    "noise": ["training/gpu/noise.py", "training/noise.py"],
}
CLASSES_TWICE = {
    "RandomAllocation": ["tacit.events", "tacit.sampling"],  # both are public names
    "RandomizedResponse": ["tacit.events", "tacit.local.randomized_response"],  # both are public
    "Records": ["tacit.experiments.logit", "tacit.training.records"],
}
# Ways to write a formula in code, and the file that holds its only body.
FORMULAS = {
    "log(1 - q + q e^x)": (
        r"log1p\((\w*rate\w*|q) \* (np\.|math\.)?expm1\("
        r"|logaddexp\(np\.log1p\(-(rate|q)\), np\.log\(",
        "accounting/one_event.py",
    ),
    "group privacy of (epsilon, delta)": (
        r"delta \* \(1 \+ (math|np)\.exp\(",
        "accounting/one_event.py",
    ),
    "pure epsilon of randomized response": (
        r"log1p\(\(1 - p\) \* n / p\)",
        "accounting/one_event.py",
    ),
}
RETIRED = r"\bclass _?(Machinery|Clipper|Mailbox|Tail|Bill|Recorder|Piece|Micro|Part)\b"


@pytest.mark.parametrize("name", structure.ALGORITHMS)
def test_an_algorithm_is_found_by_the_name_of_a_file(name):
    assert (structure.PACKAGE / structure.ALGORITHMS[name]).is_file()


def test_private_is_one_screen_with_few_imports():
    assert structure.n_lines(structure.modules()["tacit.training.private"]) <= 250
    assert len(structure.imports_of("tacit.training.private")) <= 10


def test_imports_inside_training_are_shallow():
    assert len(structure.import_depth("training")) <= 12


def test_packages_are_entered_through_their_doors():
    assert structure.skipped_doors() == []


def test_a_name_belongs_to_one_file_and_one_class():
    assert structure.repeated_files() == FILES_TWICE
    assert structure.repeated_classes().items() <= CLASSES_TWICE.items()


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_formula_has_one_body(formula):
    pattern, home = FORMULAS[formula]
    holders = {
        path.relative_to(structure.PACKAGE).as_posix()
        for path in structure.modules().values()
        if re.search(pattern, path.read_text(encoding="utf-8"))
    }
    assert holders == {home}


# Draws of floating-point noise: added to a private float, they reveal it in the low bits.
FLOAT_NOISE = {
    *("normal", "laplace", "gumbel", "exponential", "logistic", "standard_normal", "normal_"),
    *("standard_exponential", "standard_gamma", "standard_cauchy", "multivariate_normal"),
    *("laplace_", "exponential_", "log_normal_", "cauchy_"),
}
FLOAT_NOISE_ALLOWED = {
    "experiments/features.py": "a public random projection",
    "experiments/regression_studies.py": "simulated records, which are public",
    "training/noise.py": "noise of training steps, which has its own release",
    "_pipelines.py": "synthetic tables on which steps of a pipeline are tried",
}


def test_no_float_noise_is_drawn_outside_the_mechanisms():
    found = {
        path.relative_to(structure.PACKAGE).as_posix()
        for path in structure.modules().values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in FLOAT_NOISE
    }
    assert found <= FLOAT_NOISE_ALLOWED.keys()


def test_retired_words_stay_retired():
    for path in structure.modules().values():
        assert not re.search(RETIRED, path.read_text(encoding="utf-8")), path


def test_files_are_one_noun_and_bodies_fit_on_a_screen():
    for path in structure.modules().values():
        assert structure.n_lines(path) <= 700, path
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.body:
                first = node.body[1] if ast.get_docstring(node) and node.body[1:] else node.body[0]
                assert (node.end_lineno or 0) - first.lineno < 80, f"{path}: {node.name}"

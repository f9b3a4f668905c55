"""Pages of the site that are made from the code, and links that leave the folder docs/.

mkdocs calls the functions whose names begin with `on_`. The sources are read, not imported, so the
site is built without torch. Made here: the reference of every public package, the reference of
recipes, a page for each program of examples/ and one for each table of benchmarks/results.
"""

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
EXAMPLES = ROOT / "examples"
REPOSITORY = "https://github.com/tacit-dp/tacit/blob/main/"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the generated pages to the navigation."""
    packages = [{name: f"reference/{name}.md"} for name in public_packages()]
    config.nav = [
        *(config.nav or []),
        {
            "Reference": [
                {"tacit": "reference/tacit.md"},
                *packages,
                {"command line": "reference/command-line.md"},
                {"recipes": "reference/recipes.md"},
                {"schemas": "reference/schemas.md"},
            ]
        },
        {"Examples": [{path.name: f"examples/{path.stem}.md"} for path in examples()]},
        {"Measurements": [{name: f"results/{name}.md"} for name in result_names()]},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the files of the site."""
    pages = {f"reference/{name}.md": reference_page(name) for name in public_packages()}
    pages["reference/tacit.md"] = top_page()
    pages["reference/command-line.md"] = command_page()
    pages["reference/recipes.md"] = settings_page(
        ROOT / "tacit/experiments/recipe.py", "Recipes", "Section ["
    )
    pages["reference/schemas.md"] = settings_page(
        ROOT / "tacit/datasets/columns.py", "Schemas", "", ROOT / "tacit/datasets/csv_lines.py"
    )
    for name in result_names():
        pages[f"results/{name}.md"] = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    for example in examples():
        pages[f"examples/{example.stem}.md"] = example_page(example)
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for figure in sorted([*RESULTS.rglob("*.svg"), *RESULTS.rglob("*.png")]):
        path = f"results/{figure.relative_to(RESULTS).as_posix()}"
        files.append(File.generated(config, path, abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point links to benchmarks/results at its pages, and other links out of docs/ at the code.

    The name of an example, such as `examples/plain_loop.py`, becomes a link to its page.
    """
    here = posixpath.dirname(page.file.src_uri)
    source = "benchmarks/results" if here == "results" else posixpath.join("docs", here)

    def moved(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(source, found[1]))
        if target.startswith("docs/") or found[1].startswith(("http", "#", "mailto")):
            return found[0]
        name = re.fullmatch(r"benchmarks/results/([\w/-]+\.(?:md|svg|png))", target)
        if name:
            return f"]({posixpath.relpath(f'results/{name[1]}', here or '.')})"
        if not (ROOT / target).exists():
            raise FileNotFoundError(f"{page.file.src_uri}: {found[1]} does not exist")
        return f"]({REPOSITORY}{target})"

    def linked(found: re.Match[str]) -> str:
        name = f"examples/{found[1]}"
        return f"[{found[0]}]({posixpath.relpath(f'{name}.md', here or '.')})"

    markdown = re.sub(r"\]\(([^)\s]+)\)", moved, markdown)
    names = "|".join(re.escape(path.stem) for path in examples())
    return re.sub(rf"(?<!\[)`examples/({names})\.(?:py|sh)`(?!\])", linked, markdown)


def examples() -> list[Path]:
    """Return the programs of examples/, by name."""
    return sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.sh")])


def example_page(path: Path) -> str:
    """Return the page of one example: its whole text."""
    language = {".py": "py", ".sh": "sh"}[path.suffix]
    return f"# {path.name}\n\n```{language}\n{path.read_text(encoding='utf-8')}```\n"


def public_packages() -> list[str]:
    """Return the packages and modules named in `tacit.__all__`, in order."""
    folder = ROOT / "tacit"
    return [
        name
        for name in exported(folder / "__init__.py")
        if (folder / name).is_dir() or (folder / f"{name}.py").is_file()
    ]


def exported(path: Path) -> list[str]:
    """Return `__all__` of a module, or else the public names that it defines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return sorted(ast.literal_eval(node.value), key=str.lower)
    named = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [node.name for node in named if not node.name.startswith("_")]


def reference_page(name: str) -> str:
    """Return the page of one package: its docstring, then every public name."""
    folder = ROOT / "tacit" / name
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    module = ast.parse(path.read_text(encoding="utf-8"))
    lines = [f"# tacit.{name}", "", *(ast.get_docstring(module) or "").splitlines(), ""]
    for public in exported(path):
        lines += [f"::: {identifier(name, public)}", ""]
    return "\n".join(lines)


def identifier(package: str, public: str) -> str:
    """Return the dotted name of a public object; a module of the same name would hide it."""
    is_hidden = (ROOT / "tacit" / package / f"{public}.py").is_file()
    return f"tacit.{package}.{public}.{public}" if is_hidden else f"tacit.{package}.{public}"


def top_page() -> str:
    """Return the page of `tacit` itself: the names that scripts use most, and where they live."""
    tree = ast.parse((ROOT / "tacit/__init__.py").read_text(encoding="utf-8"))
    homes: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOMES":
            homes = ast.literal_eval(node.value)
    lines = ["# tacit", "", *(ast.get_docstring(tree) or "").splitlines(), ""]
    lines += ["| name | defined in |", "|---|---|"]
    for name, home in sorted(homes.items(), key=lambda pair: pair[0].lower()):
        target = identifier(home, name)
        lines.append(f"| [`tacit.{name}`][{target}] | [`tacit.{home}`]({home}.md) |")
    lines += ["", "`tacit.__version__` is the version as text.", ""]
    return "\n".join(lines)


def command_page() -> str:
    """Return the page of the command line: every verb with its arguments and options."""
    tree = ast.parse((ROOT / "tacit/cli/__init__.py").read_text(encoding="utf-8"))
    (verbs,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "VERBS"
    )
    lines = [
        "# Command line",
        "",
        "`tacit VERB --help` prints the same. Every verb has `--json`.",
        "",
    ]
    for verb, purpose in verbs.items():
        module = ast.parse((ROOT / f"tacit/cli/{verb}.py").read_text(encoding="utf-8"))
        lines += [f"## tacit {verb}", "", purpose, ""]
        for node in module.body:
            if isinstance(node, ast.FunctionDef) and is_command(node, verb):
                lines += command_lines(node, verb)
    return "\n".join(lines)


def is_command(node: ast.FunctionDef, verb: str) -> bool:
    """Return whether a function of a verb's file is the verb or one of its commands."""
    decorated = any("command" in ast.unparse(d) for d in node.decorator_list)
    return decorated or node.name == verb


def command_lines(node: ast.FunctionDef, verb: str) -> list[str]:
    """Return a heading, the docstring and the options of one command."""
    lines: list[str] = []
    if node.name != verb:
        lines += [f"### tacit {verb} {node.name.strip('_').replace('_', '-')}", ""]
    lines += [*(ast.get_docstring(node) or "").replace("\b", "").splitlines(), ""]
    for argument in [*node.args.args, *node.args.kwonlyargs]:
        words = help_of(argument)
        if words:
            is_option = argument.annotation is not None and "Option" in ast.unparse(
                argument.annotation
            )
            shown = f"--{argument.arg.replace('_', '-')}" if is_option else argument.arg.upper()
            lines.append(f"- `{shown}`: {words}")
    return [*lines, ""]


def help_of(argument: ast.arg) -> str:
    """Return the help text of an annotated argument of typer, or nothing."""
    for node in ast.walk(argument.annotation) if argument.annotation else ():
        if isinstance(node, ast.keyword) and node.arg == "help":
            return ast.literal_eval(node.value) if is_literal(node.value) else ""
    return ""


def is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def settings_page(path: Path, title: str, begins: str, *more: Path) -> str:
    """Return a page of settings: each dataclass with its fields, defaults and their docstrings."""
    lines = [f"# {title}", ""]
    for source in (path, *more):
        tree = ast.parse(source.read_text(encoding="utf-8"))
        for node in tree.body:
            words = ast.get_docstring(node) if isinstance(node, ast.ClassDef) else None
            if words and words.startswith(begins) and not node.name.startswith("_"):
                table = settings_rows(node)
                if table:
                    lines += [f"## {node.name}", "", *words.splitlines(), "", *table, ""]
    return "\n".join(lines)


def settings_rows(node: ast.ClassDef) -> list[str]:
    """Return a table of the fields of a dataclass, or nothing if it has none."""
    rows: list[str] = []
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or ast.unparse(field.target).startswith("_"):
            continue
        is_said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        said = " ".join(str(after.value.value).split()) if is_said else ""  # type: ignore[union-attr]
        kind = ast.unparse(field.annotation).replace("|", "or")
        rows.append(f"| `{ast.unparse(field.target)}` | {kind} | {default_of(field)} | {said} |")
    return ["| setting | type | default | meaning |", "|---|---|---|---|", *rows] if rows else []


def default_of(field: ast.AnnAssign) -> str:
    """Return the default of a field; `choice` gives all values, the default first."""
    value = field.value
    if value is None:
        return "required"
    if isinstance(value, ast.Call):
        if ast.unparse(value.func) == "choice":
            return ", ".join(f"`{ast.unparse(one)}`" for one in value.args)
        value = value.args[0] if value.args else None
    return f"`{ast.unparse(value)}`" if value is not None else "empty"


def result_names() -> list[str]:
    """Return the names of the tables of measurements."""
    return sorted(path.stem for path in RESULTS.glob("*.md"))

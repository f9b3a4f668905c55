"""Lines that would install another project: `python tests/install_lines.py` prints each of them.

PyPI has a package `tacit` that is not ours. Ours is installed as `tacit-dp` and imported as
`tacit`, so no file of the repository may tell a person or a program to install `tacit`.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_NAME = r"(?<![\w./-])tacit(?![\w/-]|\.\w)"  # not part of a longer name, a path or a module
_TOOLS = r"(?:pip[x\d.]*|uv|conda|mamba|micromamba|poetry|pdm|rye|hatch|pixi)"
_VERBS = r"(?:install|add|run|tool|download|wheel|upgrade|inject|pip)"
# Between words: blanks, a continued line, or two string literals of one message.
_GAP = r"(?:[ \t]+|[ \t]*\\\n\s*|[ \t]*[\"']\n\s*[a-z]*[\"'])"
_WORDS = rf"(?:{_GAP}[^\s`|;&#]+)*?"  # options and other requirements
FOREIGN = {
    "an extra of the other package": rf"{_NAME}\[(?=[a-z])",
    "an install command": rf"\b(?:uvx|{_TOOLS}[ \t]+{_VERBS}){_WORDS}{_GAP}[\"']?{_NAME}",
    "a requirement": rf"{_NAME} ?(?:[=~!<>]=|===|>|<) ?\d",
    "a requirement on its own line": r"^\s*(?:-\s+)?[\"']?tacit[\"']?,?\s*(?:#.*)?$",
    "metadata of the other package": r"\b(?:version|distribution|metadata|requires|files)"
    r"\([\"']tacit[\"']\)",
    "its page": r"(?i:pypi)[\w./:-]*/tacit(?![\w-])",
}
# Where a bare name on its own line is a requirement.
_REQUIREMENTS = re.compile(r"(require\w*|constraints?)[\w.-]*\.txt$|environment[\w.-]*\.ya?ml$")


def foreign_lines(text: str, name: str) -> Iterator[tuple[int, str]]:
    """Yield line number and reason of each place of `text` that names the other package."""
    for reason, pattern in FOREIGN.items():
        if reason == "a requirement on its own line" and not _REQUIREMENTS.search(name):
            continue
        for found in re.finditer(pattern, text, flags=re.MULTILINE):
            yield text.count("\n", 0, found.end()) + 1, reason


def files() -> list[Path]:
    """Return every file that is or would be committed."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = {ROOT / name for name in listed.split("\0") if name}
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


def found() -> list[str]:
    """Return `file:line: reason` for every line that names the other package."""
    lines = []
    for path in files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture or another binary file
        name = path.relative_to(ROOT).as_posix()
        lines += [f"{name}:{line}: {reason}" for line, reason in foreign_lines(text, name)]
    return lines


if __name__ == "__main__":
    print(*(lines := found()), sep="\n")
    sys.exit(bool(lines))

"""Show bare doctests of a docstring as an examples section on the site."""

import re

import griffe


class DoctestSections(griffe.Extension):
    """Put a heading before the first doctest of a docstring that has none."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Change the docstring of one object, as the site reads it."""
        words = obj.docstring
        if words is None or ">>> " not in words.value or "Examples\n---" in words.value:
            return
        heading = "Examples\n--------\n"
        words.value = re.sub(r"^(?=>>> )", heading, words.value, count=1, flags=re.MULTILINE)

"""The command `tacit`. It stands beside the package, because another project can replace that.

PyPI's `tacit`, which is not ours, has files of the same names. Whichever is installed last wins.
"""

import sys


def main() -> None:
    """Run the command line, or say in one sentence that another package took its place."""
    try:
        import tacit
    except Exception:  # the other package may fail in any way, for what it needs may be missing
        tacit = None
    if "make_private" not in dir(tacit):
        sys.exit(
            "error: another package, which PyPI calls tacit, has replaced files of tacit-dp; run: "
            "pip uninstall --yes tacit && pip install --force-reinstall --no-deps tacit-dp"
        )
    from tacit.cli import main

    main()

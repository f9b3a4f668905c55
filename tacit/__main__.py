"""`python -m tacit` is the `tacit` command."""

from tacit.cli import main

if __name__ == "__main__":
    main()

"""The noise of a run: its key, its grid, independent and correlated."""

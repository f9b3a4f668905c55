"""Loops over a run: whose turn it is, loops of other libraries, epochs and what is reported."""

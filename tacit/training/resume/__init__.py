"""Payments and restarts of a run."""

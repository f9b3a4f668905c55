"""Accountants: pure functions from an event to what it cost."""

from tacit.accounting.compose import flatten

__all__ = ["flatten"]

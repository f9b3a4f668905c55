"""Clip rules, and what is proved about the rounding of clipped sums."""

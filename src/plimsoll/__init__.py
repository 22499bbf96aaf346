"""Plimsoll: RLHF that knows its load line."""

__version__ = "0.1.0"

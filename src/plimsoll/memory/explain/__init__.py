"""Explain: why a run ran out of memory, and what would have fitted."""

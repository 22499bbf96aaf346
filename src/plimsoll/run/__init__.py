"""The files that a run writes, its display, and its state for resuming. Imports no torch."""

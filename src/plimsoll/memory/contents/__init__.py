"""The contents of every process, card and host of a run at every moment."""

"""Weights that correct for the difference between sampler and trainer: one method per file."""

"""Compute the shape of a model from its config.json or its well-known name."""

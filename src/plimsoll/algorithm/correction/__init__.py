"""Weights against the difference between the sampler and the trainer; one idea a file."""

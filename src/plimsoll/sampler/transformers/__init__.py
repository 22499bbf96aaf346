"""Rollouts by transformers, in the process of whoever asks."""

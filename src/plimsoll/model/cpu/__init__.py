"""Faster functions for models on the CPU."""

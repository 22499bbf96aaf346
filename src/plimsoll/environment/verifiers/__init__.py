"""Environments of verifiers (Prime Intellect's), which has a virtual environment of its own."""

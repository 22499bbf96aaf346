"""Environments of verifiers (Prime Intellect's), in a virtual environment of their own."""

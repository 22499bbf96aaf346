"""Environments of Prime Intellect's verifiers, in a separate virtual environment."""

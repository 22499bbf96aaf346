"""Rewards that others compute: servers over HTTP, and judges."""

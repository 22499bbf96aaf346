"""Agents that play whole episodes by calls of their own."""

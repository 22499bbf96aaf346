"""Agents: code that plays an episode by calling the policy whenever it wants a turn."""

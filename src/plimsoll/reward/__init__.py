"""Rewards of trajectories. Each built-in rule is a file with one function `reward`."""

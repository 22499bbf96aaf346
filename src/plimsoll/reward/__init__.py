"""Trajectories to reward parts. One file per rule, each with one function `reward`."""

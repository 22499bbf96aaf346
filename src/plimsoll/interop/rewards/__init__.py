"""Adapters of other systems' reward functions: each file has one value `ADAPTER`."""

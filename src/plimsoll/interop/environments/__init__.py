"""Adapters of other systems' environments: each file has one value `ADAPTER`."""

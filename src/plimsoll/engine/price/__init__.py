"""The price of a role: what it holds on one training rank, computed without torch."""

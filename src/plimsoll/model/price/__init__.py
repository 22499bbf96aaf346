"""The memory of a model's forward and backward pass, computed without torch."""

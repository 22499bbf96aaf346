"""What a forward and backward of a model holds, reckoned without torch."""

"""Changes that make a config fit, and the cost of each."""

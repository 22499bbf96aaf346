"""The vocabulary of prices: items of memory, and the moments of a run at which each exists."""

"""What a price is told in: items of memory, and the moments of a run at which each exists."""

"""A trainer engine of plain PyTorch: one rank, everything in memory."""

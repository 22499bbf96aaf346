"""A trainer engine of plain PyTorch: the whole model on each rank, gradients added over ranks."""

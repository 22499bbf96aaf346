"""Pure tensor functions, one kind a file; no DeepSpeed, Ray or transformers."""

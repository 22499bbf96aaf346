"""Pure tensor functions, one idea a file; no DeepSpeed, Ray or transformers."""

"""Models: loading, packed forwards, heads, adapters and quantization, and their prices."""

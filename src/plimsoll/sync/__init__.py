"""Weights on their way from the trainer to samplers: channel, buckets, landing, proof."""

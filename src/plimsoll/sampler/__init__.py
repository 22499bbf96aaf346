"""Rollouts: engines that sample responses, their prices, and new weights for them."""

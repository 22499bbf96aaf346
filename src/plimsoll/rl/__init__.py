"""Reinforcement learning: from prompts to scored trajectories, advantages and updates."""

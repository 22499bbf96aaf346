"""Rollouts by vLLM."""

"""A rollout engine that gives the reference answers."""

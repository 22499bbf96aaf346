"""Training ranks and rollout engines: in one process, or as supervised Ray actors."""

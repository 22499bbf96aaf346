"""Episodes: what an environment says to what was sampled, until it is done."""

"""Episodes: the policy and an environment speak in turn until the environment is done."""

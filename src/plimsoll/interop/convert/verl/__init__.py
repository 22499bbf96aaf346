"""Convert commands of verl 0.9.1, whose settings are overrides of hydra."""

"""Commands of verl 0.9.1, whose settings are hydra's overrides: a table of those that people use,
and rules for those that mean something only together."""

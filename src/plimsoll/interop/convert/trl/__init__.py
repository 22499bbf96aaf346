"""Convert commands of TRL 1.16 and the YAML that they read."""

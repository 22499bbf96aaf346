"""Commands of TRL 1.16 and the YAML that they read: a table of their settings, and rules for those
that mean something only together."""

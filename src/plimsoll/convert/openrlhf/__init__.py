"""Commands of OpenRLHF 0.6.0 to 0.11.2: a table of their flags, and rules for those that mean
something only together."""

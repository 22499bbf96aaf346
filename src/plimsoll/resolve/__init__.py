"""The meaning of a config: its run, its roles, its rules and the values of `auto`."""

"""`plimsoll doctor`: observe the machine (machine.py), judge it (rules.py, limits.py), report."""

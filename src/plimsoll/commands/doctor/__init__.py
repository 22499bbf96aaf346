"""`plimsoll doctor`: what it looks at (machine.py), the rules (rules.py, limits.py), its report."""

"""Write configs from the commands and scripts that start other trainers.

No program of a script is started. Each trainer's package has a table of its settings, and rules for
those that do more than rename a value. `writer` turns both into a config.
"""

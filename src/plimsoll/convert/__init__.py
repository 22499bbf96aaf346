"""Configs from what others' trainers are started with. Nothing is executed: commands and scripts
are read."""

"""Rules that settings, files and the machine must keep, by subject."""

"""Rules that find settings that cannot work, or do not fit, with the reason and the way out."""

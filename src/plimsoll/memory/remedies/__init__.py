"""What to write in a config, or to do, where memory lacks: for refusals, suggestions, reports."""

"""The page of a run: pure functions from run directories to JSON, and one HTML page that shows it,
live or frozen with the JSON within."""

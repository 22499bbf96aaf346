"""The report of a run: what it learned and what it took, as text and as one HTML file."""

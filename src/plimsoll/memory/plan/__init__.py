"""The plan as a whole: everything priced, placed and judged, and how it is shown."""

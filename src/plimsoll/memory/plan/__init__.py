"""The plan as a whole: everything priced, placed and judged; and its texts."""

"""Everything priced and placed: peaks, verdict, culprit, and how they are shown."""

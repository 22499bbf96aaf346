"""Child processes: how to start, feed, limit and end them; and a sandbox."""

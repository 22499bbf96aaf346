"""The run directory: what a run writes, shows and needs to go on; free of torch."""

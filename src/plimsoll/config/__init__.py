"""The settings of a run: their models, how they are read, and how errors in them are reported."""

"""Data: from files and data sets to rows, tokens and packs."""

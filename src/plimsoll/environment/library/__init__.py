"""Environments by their names: each file has a class of the file's name, such as `GuessNumber`."""

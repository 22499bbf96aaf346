"""Environments by name: each file has a class of the file's name, such as `GuessNumber`."""

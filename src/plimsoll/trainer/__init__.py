"""Trainer engines: what one training rank does with the models of its roles."""

"""Parts that serve other systems: converters of commands, adapters of functions and environments.

The rooms below find the adapters by name and import none.
"""

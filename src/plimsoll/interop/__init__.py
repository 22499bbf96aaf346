"""Support for other systems: converters of their commands, adapters of rewards and environments.

Other packages find the adapters here by the package's name, and import none of them directly.
"""

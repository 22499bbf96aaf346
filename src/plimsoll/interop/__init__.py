"""What only serves other systems: converters of their commands, and adapters of their functions and
environments. The rooms below find the adapters by name and import none."""

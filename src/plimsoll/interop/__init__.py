"""What only serves other systems: converters of their commands."""

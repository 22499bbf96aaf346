"""What only serves other systems. The rooms below find its adapters by name and import none."""

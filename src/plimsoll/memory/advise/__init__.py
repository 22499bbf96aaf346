"""What would fit instead, and what each answer costs."""

"""What would fit instead, and at what speed."""

"""What a model is made of, from its config.json or its well-known name."""

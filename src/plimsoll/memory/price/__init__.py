"""What each thing weighs, and when it exists: states, activations, engines."""

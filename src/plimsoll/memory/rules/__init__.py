"""What cannot work, or not here, whatever it weighs."""

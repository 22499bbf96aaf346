"""What cannot work, or not here, and what does not fit: with the reason and the way out."""

"""Code for the Python of verifiers' virtual environment. It imports nothing of Plimsoll's."""

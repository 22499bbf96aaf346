"""What the Python of verifiers' virtual environment runs. It imports nothing of Plimsoll's."""

"""Code that runs in verifiers' virtual environment. It imports nothing from Plimsoll."""

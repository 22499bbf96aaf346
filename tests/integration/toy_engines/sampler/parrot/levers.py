"""The engine has no levers."""

LEVERS = ()

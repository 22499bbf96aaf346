"""Child processes: start them, feed them, limit them, end them; and a sandbox for programs that
nobody trusts."""

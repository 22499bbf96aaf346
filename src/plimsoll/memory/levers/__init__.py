"""The memory levers: which there are, what each may write, and the descent that turns them."""

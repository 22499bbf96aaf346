"""Python functions as rewards: called in threads, as coroutines, or in processes of their own."""

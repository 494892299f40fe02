"""One process: what we know about it, its history, a look into its step, what can be done with it."""

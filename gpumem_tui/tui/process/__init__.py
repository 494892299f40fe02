"""One process: what is known of it, its history, a look into its step, what can be done with it."""

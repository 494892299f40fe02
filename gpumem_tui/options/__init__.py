"""From what was typed to what is run."""

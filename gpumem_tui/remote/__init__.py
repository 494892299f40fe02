"""Other machines, watched over the user's own ssh."""

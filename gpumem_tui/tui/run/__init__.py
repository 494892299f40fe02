"""A command that trains, in one pane, and the Monitor on it in the other."""

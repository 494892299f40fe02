"""What each panel says, worked out from the state alone: no widget, no terminal, so tests read it as data."""

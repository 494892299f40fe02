"""Several hosts at once."""

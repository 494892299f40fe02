"""A recording on any screen: to another moment, to an alert, held."""

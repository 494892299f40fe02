"""Widgets that draw the views of a state; none reads anything but the state it is shown."""

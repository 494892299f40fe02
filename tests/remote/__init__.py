"""Other hosts, played by stand-ins for ssh."""

"""What a user can get wrong, told apart from what is wrong with the program."""

from __future__ import annotations


class OptionError(Exception):
    """An option that cannot be obeyed: one line that names the option, what was wrong with it, and the mend."""

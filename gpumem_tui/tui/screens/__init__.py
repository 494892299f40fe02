"""One module and one .tcss a screen."""

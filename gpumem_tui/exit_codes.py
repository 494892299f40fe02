"""The exit codes that the command line promises; 0 is success, and a program under `run` keeps its own."""

EXIT_BAD_INPUT = 2
EXIT_NOTHING_FITS = 3
EXIT_FAILED = 4
"""The device or a trial."""
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""

"""The program in a browser: a web server on this machine's loopback, and a process of the program for each visitor."""

import os

os.environ.setdefault("AIOHTTP_NOSENDFILE", "1")  # read as aiohttp is imported
"""Where a connection is cut while `loop.sendfile` sends on it, asyncio keeps its descriptor and, once a visitor gets
the same number, does not hear the visitor (seen with Python 3.11)."""

"""GPUs and networks known to the program: TOML data, the shapes it fills, and the loader.

Nothing is imported here: child processes take `catalog.shapes` alone, which needs only the standard library.
"""

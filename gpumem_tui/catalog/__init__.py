"""What the program knows about GPUs and networks: TOML data, the shapes it fills, and the loader.

Nothing is imported here: child processes take `catalog.shapes` alone, which needs only the standard library.
"""

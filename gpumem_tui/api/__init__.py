"""The Python API and the magics of notebooks: thin skins over the functions that the command line calls."""

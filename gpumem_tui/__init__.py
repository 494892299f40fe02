"""Where GPU memory goes while a neural network trains, how large a batch fits, and what would help."""

__version__ = "0.1.0"

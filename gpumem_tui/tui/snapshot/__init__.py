"""A PyTorch memory snapshot on the screen."""

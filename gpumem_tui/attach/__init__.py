"""Putting the probe into a training process: by launching it (`run`) or while it runs (`attach`)."""

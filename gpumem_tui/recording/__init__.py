"""Recordings of the GPUs of one machine or of several: written, read, searched and played."""

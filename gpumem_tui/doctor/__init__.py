"""Checks what works on this machine, and names the fix for what does not."""

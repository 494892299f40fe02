"""Whose GPUs the Monitor watches and the search runs on."""

from __future__ import annotations

from gpumem_tui.monitor.nvml import NVIDIA

VENDOR = NVIDIA
"""The one vendor there is so far; a second one is chosen between here."""

"""NVIDIA's GPUs, by NVML. Nothing outside of this folder imports pynvml or knows a name of its."""

NO_DRIVER = "no NVIDIA driver on this machine"
NO_DRIVER_LOADED = "the NVIDIA driver is not loaded"
"""NVML's library comes with many container images: with a driver that is not loaded there may be no GPU at all."""

"""AMD's GPUs, by AMD SMI. Nothing outside of this folder imports amdsmi or knows a name of its."""

NO_DRIVER = "no AMD driver on this machine"
NO_LIBRARY = "the AMD driver runs, but its library libamd_smi.so"
"""How a snapshot's problem begins where the kernel has a driver and nothing more is installed."""

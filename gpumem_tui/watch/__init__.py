"""The viewer's side of watching: reads what probes publish, and asks them for a closer look. Never imports torch."""

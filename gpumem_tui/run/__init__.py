"""One run of a step on a GPU, real or simulated, in a process of its own, and what it reports."""

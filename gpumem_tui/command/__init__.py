"""A user's training command on a GPU, real or simulated: what runs inside of its processes."""

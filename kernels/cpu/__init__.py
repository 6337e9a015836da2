"""Fast operations on the CPU, through torch's own vectorised and threaded ones."""

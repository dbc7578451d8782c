"""The host's update kernels: each touches every byte of an update once. numba and numpy; no torch."""

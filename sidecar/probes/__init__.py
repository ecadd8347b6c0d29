"""The probes: one file each, found by its ``PROBE``. They know nothing of each other."""

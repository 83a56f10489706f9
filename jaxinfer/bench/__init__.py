"""Measurements, each a command that appends JSON lines to a file under `docs/measurements`."""

"""Contracts of operations, one file each."""

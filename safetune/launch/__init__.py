"""A launch whose choice is known.

A grid and arguments enter; a launched kernel leaves, without I/O. Runs in the caller's process.
"""

"""A launch whose choice is known, and the state of each key.

In: a grid and arguments. Out: a launched kernel, without I/O. Runs in the caller's process.
"""

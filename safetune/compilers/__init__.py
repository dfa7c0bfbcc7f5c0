"""Launches by another compiler: torch.compile, JAX and others.

In: a tuner and a traced or described call. Out: one config. Runs in the caller's process.
"""

"""What a user writes: the decorator, and the tuner that it makes.

A kernel and its settings enter; an `Autotuner`, which launches by `launch` or asks `miss`, leaves.
Runs in the caller's process.
"""

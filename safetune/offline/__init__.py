"""Ahead of time: tuning, compiling what is chosen, and what stored trials say of a list of configs.

In: workloads, recorded calls, stored trials, files of others. Out: stored choices, compiled
kernels, shorter lists. Runs in the process of the command.
"""

"""Work ahead of time: tuning, compiling choices, and shortening lists of configs by stored trials.

In: workloads, recorded calls, stored trials, other projects' files. Out: stored choices, compiled
kernels, shorter lists. Runs in the process of the command.
"""

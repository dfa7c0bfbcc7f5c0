"""Checks of kernels without tuning: which program writes which element.

In: a kernel and a launch. Out: a report. Runs in the caller's process, in Triton's interpreter.
"""

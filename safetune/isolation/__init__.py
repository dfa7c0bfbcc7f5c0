"""The processes that compile and measure, seen from the caller's process.

In: jobs. Out: outcomes. The folder `child` runs on the other side, and shares `protocol` only.
"""

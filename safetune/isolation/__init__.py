"""The processes that compile and measure, seen from the caller's process.

In: jobs. Out: outcomes.
"""

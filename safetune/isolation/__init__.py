"""The processes that compile and measure, from the view of the caller's process.

In: jobs. Out: outcomes.
"""

"""The processes that compile and measure, seen from the caller's process.

In: jobs. Out: outcomes. A child imports only `protocol` and `backend` from here.
"""

"""The processes that compile and measure, seen from the caller's process.

Jobs enter; outcomes leave. A child imports `protocol` and nothing else from here.
"""

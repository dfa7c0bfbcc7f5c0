"""The processes that compile and measure, seen from the caller's process.

Jobs enter; outcomes leave. Only `protocol` is shared with `child`.
"""

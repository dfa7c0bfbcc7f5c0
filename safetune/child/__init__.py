"""Runs in a child process, and only there.

In: jobs, through a pipe. Out: answers in plain JSON. No other folder imports this one; both sides
share `isolation.protocol` and `isolation.backend`.
"""

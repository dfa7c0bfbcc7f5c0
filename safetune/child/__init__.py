"""What runs in a child process, and nothing else.

Jobs enter by a pipe; answers in plain JSON leave. No other folder imports this one.
"""

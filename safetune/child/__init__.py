"""What runs in a child process, and nothing else.

Jobs enter through a pipe; answers in JSON leave. No other folder imports this one: the fork servers
are started by the name of `server_main`.
"""

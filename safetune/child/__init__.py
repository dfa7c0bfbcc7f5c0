"""Runs in a child process, and only there.

In: jobs, through a pipe. Out: answers in plain JSON. No other folder imports this one: the fork
servers start `server_main` by its name.
"""

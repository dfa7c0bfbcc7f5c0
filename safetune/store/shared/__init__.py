"""Stores that many machines use: a directory, object storage, PostgreSQL.

Records enter and leave, in a thread that the caller waits for within a budget.
"""

"""Stores that many machines use: a directory, object storage, PostgreSQL.

In and out: records. All I/O runs in one thread; callers wait for it within a time budget.
"""

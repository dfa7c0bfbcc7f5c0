"""Tuning ahead of time.

In: workloads or recorded calls. Out: stored choices. Runs in the process of `safetune tune`.
"""

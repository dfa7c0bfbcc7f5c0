"""Tunings without a program around them.

Workloads or recorded calls enter; stored choices leave. Runs in the process of `safetune tune`.
"""

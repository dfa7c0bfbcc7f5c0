"""Shared by the parent and its children: jobs and answers, back ends, device memory, times.

In: a device, a frame. Out: bytes, addresses, answers, times. Runs in both.
"""

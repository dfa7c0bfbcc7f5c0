"""What two calls must share to share a choice.

A kernel, its readers and one call's arguments enter; a `KeyReport` and a `TuningKey` leave.
Runs in the caller's process.
"""

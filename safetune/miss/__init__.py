"""A call without a choice.

The call enters; the config to launch it with leaves: stored, tuned now, or a substitute.
Runs in the caller's process.
"""

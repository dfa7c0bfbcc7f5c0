"""A call whose key has no choice.

In: the call. Out: the config to launch: stored, tuned now, or a fallback. Runs in the caller's
process.
"""

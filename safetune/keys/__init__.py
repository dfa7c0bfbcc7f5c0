"""The key: everything that two calls must have in common to share a choice.

In: a kernel, the functions that read its arguments, and the arguments of one call. Out: a
`KeyReport` and a `TuningKey`. Runs in the caller's process.
"""

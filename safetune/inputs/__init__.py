"""The caller's arguments in a form that another process can rebuild.

In: tensors and values. Out: a memory file and its description. Runs in the caller's process.
"""

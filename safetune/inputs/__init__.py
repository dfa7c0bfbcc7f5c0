"""A call in a form that another process can rebuild: kernel, arguments, tensors, grid.

In: a call. Out: bytes, a memory file and its description. Runs in both processes: the caller packs,
the child rebuilds.
"""

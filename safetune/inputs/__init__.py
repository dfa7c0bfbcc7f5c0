"""A call as something that another process can rebuild: kernel, arguments, tensors, grid.

A call enters; bytes, a memory file and its description leave. This is the code that a caller and
its children share, beside `isolation/protocol`: it runs in both.
"""

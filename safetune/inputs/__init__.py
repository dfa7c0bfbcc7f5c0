"""The caller's arguments as something that another process can rebuild.

Tensors and values enter; a memory file and its description leave. Runs in the caller's process.
"""

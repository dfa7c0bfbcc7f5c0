"""CUDA graphs, JAX, and libraries that safetune is installed under.

In: a program or a library. Out: launches of tuned kernels. Runs in the caller's process; import
each module by itself.
"""

"""Where another compiler launches the kernel: torch.compile, JAX and others.

A tuner and a traced or described call enter; one config leaves. Runs in the caller's process.
"""

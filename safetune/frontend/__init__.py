"""The public interface: the decorator, and the tuner that it makes.

In: a kernel and its settings. Out: an `Autotuner`, whose launches go to `launch`, or to `miss` if
their key has no choice. Runs in the caller's process.
"""

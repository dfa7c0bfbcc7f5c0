"""Checks on kernels and source trees that need no tuning."""

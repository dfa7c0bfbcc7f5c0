"""Findings about tuners in a tree of Python files, from their text.

In: files. Out: a finding per defect, with its rule and its place. Nothing of the tree is imported;
what a key's names are is decided by `keys`, as at run time. Runs in the process of the command.
"""

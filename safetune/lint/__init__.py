"""Findings about tuners in a tree of Python files, from their text.

In: files. Out: one finding per defect, with its rule and line. Nothing in the tree is imported;
`keys` classifies key names as at run time. Runs in the process of the command.
"""

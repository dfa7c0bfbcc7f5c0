"""Findings about tuners in a tree of Python files, from their text.

In: files. Out: a finding per defect, with its rule and its line. Nothing of the tree is imported;
`keys` classifies the names of a key, as at run time. Runs in the process of the command.
"""

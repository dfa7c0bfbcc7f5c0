"""Choices in files: shipped with a library, exported, imported.

Records enter and leave as JSON. Read in every process, written by the command line.
"""

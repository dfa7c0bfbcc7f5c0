"""Choices in files: shipped with a library, exported, imported.

In and out: records, as JSON. Every process reads packs; the command line writes them.
"""

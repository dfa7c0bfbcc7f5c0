"""The SQLite database of one machine.

In and out: records; nothing else reads its rows. Runs in every process that uses safetune, except
children.
"""

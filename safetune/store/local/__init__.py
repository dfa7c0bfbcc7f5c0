"""The SQLite database of one machine.

Records enter and leave; rows are its own affair. Runs in every process that uses safetune.
"""

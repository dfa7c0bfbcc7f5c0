"""Stores outcomes and choices: lookup, records, `local/`, `shared/` and `packs/`.

In and out: records. Runs in every process except children. Imports neither torch nor triton.
"""

"""The fixtures of tests/store/local: a store, its records, and processes that write to it."""

from tests.store.local.conftest import children, records, store

__all__ = ["children", "records", "store"]

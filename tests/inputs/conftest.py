"""The fixtures of tests/isolation: inputs are made for a process that is not the caller's."""

from tests.isolation.conftest import fifo, log, processes, records, start

__all__ = ["fifo", "log", "processes", "records", "start"]

"""The fixtures for graph capture, for these tests too."""

from tests.capturing import copies, driver, gate, no_earlier_misses, tried

__all__ = ["copies", "driver", "gate", "no_earlier_misses", "tried"]

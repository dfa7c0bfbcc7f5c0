"""The choices that a process knows of one kernel, and who has to hear of a change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.runtime.autotuner import Config


class Choices(dict[Any, Config]):
    """The config of each memory key; `changed` is called when a key gets another one, or none."""

    def __init__(self, changed: Callable[[], None]) -> None:
        super().__init__()
        self._changed = changed

    def __setitem__(self, key: Any, config: Config) -> None:
        before = self.get(key, config)
        super().__setitem__(key, config)
        if before is not config:
            self._changed()


def _telling(name: str) -> Any:
    def change(self: Choices, *args: Any, **kwargs: Any) -> Any:
        result = getattr(dict, name)(self, *args, **kwargs)
        self._changed()
        return result

    return change


for _name in ("__delitem__", "__ior__", "clear", "pop", "popitem", "update"):
    setattr(Choices, _name, _telling(_name))

"""The choices that a process knows of one kernel, and who has to hear of a change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Config

if TYPE_CHECKING:
    from safetune.frontend.autotuner import Autotuner


class Choices(dict[Any, Config]):
    """The config of each memory key; `tuner` forgets its launches when it changes."""

    def __init__(self, tuner: Autotuner) -> None:
        super().__init__()
        self.tuner = tuner

    def __setitem__(self, key: Any, config: Config) -> None:
        before = self.get(key, config)
        super().__setitem__(key, config)
        if before is not config:
            self.tuner._forget_launches()

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy is nobody's, and can be written to a file


def _telling(name: str) -> Any:
    def change(self: Choices, *args: Any, **kwargs: Any) -> Any:
        result = getattr(dict, name)(self, *args, **kwargs)
        self.tuner._forget_launches()
        return result

    return change


for _name in ("__delitem__", "__ior__", "clear", "pop", "popitem", "update"):
    setattr(Choices, _name, _telling(_name))

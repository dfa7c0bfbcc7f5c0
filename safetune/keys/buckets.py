"""Key names whose values are in the key by their bucket: `key={"n": next_power_of_2}`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from safetune.errors import InvalidSetting
from safetune.keys import encoding

#: What a bucket may be, beside a dtype: equal values of these are the same in every process.
_PLAIN = frozenset({int, bool, str, float})


@dataclass(frozen=True)
class Bucket:
    """The function for a name, which is checked whenever it is called."""

    kernel: str
    name: str
    function: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        """Return the value's bucket; raises `InvalidSetting`."""
        while type(value).__name__ == "constexpr":
            value = value.value
        try:
            found = self.function(value)
        except Exception as error:
            raise InvalidSetting(
                f"key of {self.kernel}: the function for {self.name!r} raised "
                f"{type(error).__name__} for {value!r:.80}: {error}"
            ) from error
        if type(found) in _PLAIN or encoding.is_dtype(found):
            return found
        raise InvalidSetting(
            f"key of {self.kernel}: the function for {self.name!r} returned {found!r:.80}, a "
            f"{type(found).__name__}, for {value!r:.80}; return an int, bool, str, float or dtype"
        )


def buckets_of(kernel: str, key: Any) -> dict[str, Bucket]:
    """Return the buckets in the `key=` of a decorator; raises `InvalidSetting`."""
    if not isinstance(key, Mapping):
        return {}
    for name, function in key.items():
        if function is not None and not callable(function):
            raise InvalidSetting(
                f"key of {kernel} maps {name!r} to {function!r}, which is not a function; give a "
                "function from a value to its bucket, or None for the value itself"
            )
    return {name: Bucket(kernel, name, f) for name, f in key.items() if f is not None}

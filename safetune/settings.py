"""Every SAFETUNE_* environment variable, read here and nowhere else.

Variables are read at each miss and at each decoration, never on a hit. So a test or a launcher may
change the environment at any time before the first launch of a key.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from safetune.errors import InvalidSetting, SettingWarning, with_nearest
from safetune.frozen import dataclass
from safetune.messages import logger, warn


class Mode(str, Enum):
    """What a launch does whose key has no choice.

    TUNE: measure the configs, then launch the choice.
    BACKGROUND: launch a fallback, and measure meanwhile; later launches use the choice.
    FROZEN: launch a choice or a fallback; never tune, start a process or write.
    RECORD: launch as FROZEN does, and store the call for `safetune tune --recorded`.
    OFF: launch the first config; nothing is looked up or stored.
    """

    TUNE = "tune"
    BACKGROUND = "background"
    FROZEN = "frozen"
    RECORD = "record"
    OFF = "off"


class PhantomPolicy(str, Enum):
    """What happens to a name in `key` that the kernel never reads."""

    DROP = "drop"
    KEEP = "keep"
    ERROR = "error"


class Isolation(str, Enum):
    """Where the configs of a kernel are measured: see `safetune`."""

    WORKER = "worker"
    CONFIG = "config"
    INLINE = "inline"


class CaptureMissPolicy(str, Enum):
    """Whether a key without a choice launches a fallback, or raises, under graph capture."""

    FALLBACK = "fallback"
    ERROR = "error"


#: Every variable that is read here or by the tests.
VARIABLES = frozenset(
    f"SAFETUNE_{name}"
    for name in (
        *("CACHE_DIR", "CAPTURE_MISS", "COPY_LIMIT", "EXPERIMENTAL_HIP", "FAST_LAUNCH", "INSTALL"),
        *("KEEP", "LOG", "MODE", "PACKS", "PHANTOM", "RECORD_VALUES", "SHARED", "WAIT"),
        *("TEST_EXAMPLES", "TEST_FULL", "TEST_LAUNCHES", "TEST_TENTH"),
    )
)

Choice = TypeVar("Choice", bound=Enum)

#: By value of SAFETUNE_LOG the level of the log. Without the variable it is the program's.
LOG_LEVELS = {"quiet": logging.ERROR, "info": logging.INFO, "debug": logging.DEBUG}


def parse_choice(kind: type[Choice], name: str, value: str) -> Choice:
    """Return the member of `kind` with this value; raises `InvalidSetting` with the valid ones."""
    try:
        return kind(value)
    except ValueError:
        valid = ", ".join(str(member.value) for member in kind)
        raise InvalidSetting(f"{name}={value!r} is not known; use one of: {valid}") from None


_SIZE = re.compile(r"([0-9]+)\s*(?:([KMG])(?:iB)?)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(name: str, value: str) -> int:
    """Return a size in bytes, e.g. of `4096` or `512MiB`; raises `InvalidSetting`."""
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise InvalidSetting(
            f"{name}={value!r} is not a size; give bytes, or a number with KiB, MiB or GiB"
        )
    return int(match[1]) * _UNITS[(match[2] or "").upper()]


def parse_seconds(name: str, value: str) -> float:
    """Return a number of seconds, 0 or more; raises `InvalidSetting`."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise InvalidSetting(f"{name}={value!r} is not a number of seconds; give e.g. 120")
    return seconds


def parse_keep(name: str, value: str) -> frozenset[tuple[str, str]]:
    """Return the pairs in `kernel:name,...`; raises `InvalidSetting`."""
    pairs = [part.strip().rpartition(":") for part in value.split(",") if part.strip()]
    for kernel, _, kept in pairs:
        if not (kept.isidentifier() and re.fullmatch(r"[\w.<>]+", kernel)):
            raise InvalidSetting(
                f"{name}={value!r} is not a list of kernel:name; give e.g. my_kernel:NB, or "
                "my_package.my_module.my_kernel:NB where several kernels have that name"
            )
    return frozenset((kernel, kept) for kernel, _, kept in pairs)


class SharedKind(str, Enum):
    """What keeps the records of a shared store."""

    DIRECTORY = "directory"
    POSTGRES = "postgres"
    OBJECTS = "objects"


def shared_kind(url: str) -> SharedKind:
    """Return the kind of shared store that a URL names; fsspec opens every scheme but ours."""
    scheme = url.partition("://")[0]
    if scheme in ("postgresql", "postgres"):
        return SharedKind.POSTGRES
    return SharedKind.DIRECTORY if scheme == "file" else SharedKind.OBJECTS


def check_url(url: str) -> str:
    """Return the URL of a shared store, or an empty string; raises `InvalidSetting`.

    Checks its form only, so that reading the settings imports nothing.
    """
    if not url:
        return url
    problem, kind = "", shared_kind(url)
    scheme, separator, rest = url.partition("://")
    if not separator or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        problem = "it has no scheme"
    elif kind is SharedKind.DIRECTORY and not rest.startswith("/"):
        problem = "a file URL is file:// and an absolute path"
    elif not rest and kind is not SharedKind.POSTGRES and scheme != "memory":
        problem = "it has no host or path"
    if problem:
        raise InvalidSetting(
            f"SAFETUNE_SHARED={display_url(url)!r} is not the URL of a shared store: {problem}; "
            "give file:///directory, postgresql://host/database, or a URL that fsspec knows, such "
            "as s3://bucket/folder"
        )
    return url


def display_url(url: str) -> str:
    """Return a URL for messages: without user, password and parameters.

    A password may contain any character; where its limits are ambiguous, nothing of it is shown.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "…" if re.search("[@=]", url) else url
    if scheme == "file":
        return url
    before, _, location = rest.rpartition("@")
    if re.search("[?#]", before):
        return f"{scheme}://…"
    return f"{scheme}://{re.split('[?#]', location)[0]}"


def without_password(text: str, url: str) -> str:
    """Return a message about a URL, or other words where it may have a part of the password.

    A library may take a part of the password for something else, such as the host, and name it.
    """
    from urllib.parse import unquote

    rest = url.partition("://")[2]
    before = rest.rpartition("@")[0]
    given = [before.partition(":")[2], *re.split("password=", rest, flags=re.IGNORECASE)[1:]]
    secret = rest if re.search("[/?#]", before) else " ".join(given).strip()
    parts = {secret, *re.split(r"\W+", secret), *re.split(r"\W+", unquote(secret))}
    if any(part in text for part in parts if part):
        return "the reason is not shown, as it may have a part of the password in it"
    return text


@dataclass(frozen=True)
class Settings:
    """The process-wide settings; docs/configuration.md describes the variables."""

    mode: Mode
    phantom: PhantomPolicy
    cache_dir: Path
    copy_limit: int  # in bytes
    #: WORLD_SIZE, which torchrun sets, or that of torch.distributed where it is initialised. Over
    #: 1, a process keeps the config that it launched for a key until `safetune.sync()`.
    world_size: int = 1
    packs: tuple[Path, ...] = ()  # directories, in the order of the search
    wait_s: float = 120.0  # that this process waits in total for tunings of other processes
    shared: str = ""  # a URL; empty for none
    local_world_size: int = 1  # LOCAL_WORLD_SIZE, of torchrun: the processes on this node
    capture_miss: CaptureMissPolicy = CaptureMissPolicy.FALLBACK
    fast_launch: bool = True
    keep: frozenset[tuple[str, str]] = frozenset()  # (kernel, name): they stay in the kernel's key
    log_level: int | None = None  # None: the program's
    experimental_hip: bool = False  # whether configs are tried in processes on AMD GPUs, too
    record_values: bool = False  # whether Mode.RECORD stores the values of integer tensors

    @classmethod
    def current(cls) -> Settings:
        """Read the environment; raises `InvalidSetting` for an invalid value."""
        found = _settings(tuple(map(os.environ.get, _READ)), _distributed_size(), _mode)
        if found.log_level != _log_level_set:
            _set_log_level(found.log_level)
        return found


#: The mode without SAFETUNE_MODE.
_mode = Mode.TUNE


def configure(*, mode: str) -> None:
    """Set the mode of this process where SAFETUNE_MODE is not set: a library does for its users.

    It holds for launches whose config is not decided yet, of all kernels; the last call counts.

    Args:
        mode: as SAFETUNE_MODE. With `off`, a launch uses the first config that pruning leaves, and
            nothing is looked up, stored or started.

    Raises:
        InvalidSetting: there is no such mode.
    """
    global _mode
    _mode = parse_choice(Mode, "mode", mode)


#: All that the settings depend on, beside torch.distributed and `configure`.
_READ = (*sorted(VARIABLES), "WORLD_SIZE", "LOCAL_WORLD_SIZE", "HOME", "XDG_CACHE_HOME")


@functools.lru_cache(maxsize=16)
def _settings(values: tuple[str | None, ...], ranks: int, mode: Mode) -> Settings:
    """Return the settings for the values of `_READ`: a library has hundreds of tuners."""
    _warn_of_unknown(frozenset(n for n in os.environ if n.startswith("SAFETUNE_")) - VARIABLES)
    given = {name: value for name, value in zip(_READ, values, strict=True) if value}
    get = given.get
    world_size = max(_number(given, "WORLD_SIZE", 1), ranks)
    return Settings(
        mode=parse_choice(Mode, "SAFETUNE_MODE", get("SAFETUNE_MODE", mode.value)),
        phantom=parse_choice(PhantomPolicy, "SAFETUNE_PHANTOM", get("SAFETUNE_PHANTOM", "drop")),
        cache_dir=_directory(get("SAFETUNE_CACHE_DIR") or _default_cache_dir()),
        world_size=world_size,
        capture_miss=parse_choice(
            CaptureMissPolicy, "SAFETUNE_CAPTURE_MISS", get("SAFETUNE_CAPTURE_MISS", "fallback")
        ),
        copy_limit=parse_size("SAFETUNE_COPY_LIMIT", get("SAFETUNE_COPY_LIMIT", "2GiB")),
        packs=tuple(
            _directory(part) for part in get("SAFETUNE_PACKS", "").split(os.pathsep) if part
        ),
        shared=check_url(get("SAFETUNE_SHARED", "")),
        local_world_size=_number(given, "LOCAL_WORLD_SIZE", world_size),
        wait_s=parse_seconds("SAFETUNE_WAIT", get("SAFETUNE_WAIT", "120")),
        keep=parse_keep("SAFETUNE_KEEP", get("SAFETUNE_KEEP", "")),
        record_values=_switch("SAFETUNE_RECORD_VALUES", get("SAFETUNE_RECORD_VALUES", "0")),
        experimental_hip=_switch(
            "SAFETUNE_EXPERIMENTAL_HIP", get("SAFETUNE_EXPERIMENTAL_HIP", "0")
        ),
        fast_launch=_switch("SAFETUNE_FAST_LAUNCH", get("SAFETUNE_FAST_LAUNCH", "1")),
        log_level=_log_level(get("SAFETUNE_LOG")),
    )


def _log_level(value: str | None) -> int | None:
    if value is not None and value not in LOG_LEVELS:
        raise InvalidSetting(
            f"SAFETUNE_LOG={value!r} is not known; use one of: {', '.join(LOG_LEVELS)}"
        )
    return None if value is None else LOG_LEVELS[value]


#: What SAFETUNE_LOG has set, and the program's own level before that.
_log_level_set: int | None = None
_log_level_before = logging.NOTSET


def _set_log_level(level: int | None) -> None:
    """Set the level of the log, or the program's again where the variable is gone."""
    global _log_level_set, _log_level_before
    if _log_level_set is None:
        _log_level_before = logger.level
    _log_level_set = level
    logger.setLevel(_log_level_before if level is None else level)


def installs() -> bool:
    """Return whether SAFETUNE_INSTALL asks to replace every `triton.autotune`."""
    return _switch("SAFETUNE_INSTALL", os.environ.get("SAFETUNE_INSTALL") or "0")


def _switch(name: str, value: str) -> bool:
    if value not in ("0", "1"):
        raise InvalidSetting(f"{name}={value!r} is not known; use one of: 0, 1")
    return value == "1"


def _distributed_size() -> int:
    """Return the number of ranks by torch.distributed, or 1; srun and MPI set no WORLD_SIZE."""
    found = distributed()
    return 1 if found is None else int(found.get_world_size())


def distributed() -> Any:
    """Return torch.distributed where the program has initialised it, else None; imports nothing."""
    found = sys.modules.get("torch.distributed")
    # The function is missing in builds of torch without it, and during the import.
    return found if getattr(found, "is_initialized", bool)() else None


def _number(given: Mapping[str, str], name: str, default: int) -> int:
    """Return the number in a variable that a launcher sets, not ours."""
    text = given.get(name, str(default))
    if not (text.isdecimal() and int(text) > 0):
        _warn(f"{name}={text!r} is not a number of processes; safetune takes it as {default}")
        return default
    return int(text)


@functools.cache
def _warn(text: str) -> None:
    warn(text, SettingWarning)


def _warn_of_unknown(names: frozenset[str]) -> None:
    if names:
        _warn(f"{with_nearest(sorted(names), VARIABLES)} is set; there is no such variable")


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return os.sep


#: A relative directory in a variable is below this one, wherever the program goes later.
_START = _working_directory()


def _directory(name: str) -> Path:
    """Return a directory as an absolute path; as it is where there is no such home directory."""
    path = os.path.expanduser(name)
    return Path(path if path.startswith("~") else os.path.normpath(os.path.join(_START, path)))


def _default_cache_dir() -> str:
    import platformdirs  # most clusters set SAFETUNE_CACHE_DIR

    try:
        return platformdirs.user_cache_dir("safetune", appauthor=False)
    except RuntimeError:  # without a home directory; opening the store reports it
        return os.path.join("~", ".cache", "safetune")

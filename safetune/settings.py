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
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from safetune.errors import InvalidSetting, SettingWarning, with_nearest
from safetune.frozen import dataclass
from safetune.messages import logger, warn_once


class Mode(str, Enum):
    """The behaviour of a launch whose key has no choice.

    TUNE: measure the configs, then launch the choice.
    BACKGROUND: launch a fallback, and measure meanwhile; later launches use the choice.
    FROZEN: launch a choice or a fallback; never tune, start a process or write.
    RECORD: like FROZEN, and store the call for `safetune tune --recorded`.
    OFF: launch the first config; nothing is looked up or stored.
    """

    TUNE = "tune"
    BACKGROUND = "background"
    FROZEN = "frozen"
    RECORD = "record"
    OFF = "off"


class PhantomPolicy(str, Enum):
    """The treatment of a name in `key` that the kernel never reads."""

    DROP = "drop"
    KEEP = "keep"
    ERROR = "error"


class Isolation(str, Enum):
    """The process that measures the configs of a kernel: see `safetune`."""

    WORKER = "worker"
    CONFIG = "config"
    INLINE = "inline"


class MissPolicy(str, Enum):
    """The behaviour of a launch whose key has no choice. It overrides the mode.

    FALLBACK: launch a fallback, and never tune.
    WARN: follow the mode, with a warning.
    ERROR: raise `MissError`.
    """

    FALLBACK = "fallback"
    WARN = "warn"
    ERROR = "error"


class MeasurePolicy(str, Enum):
    """The timing of a short kernel's fastest configs, after screening.

    EVENTS: each launch between two events, from a cold L2 cache.
    GRAPH: as replays of a CUDA graph, over copies of the arguments in turn.
    HOT: as replays of a CUDA graph on the same arguments, which the L2 cache may hold.
    """

    EVENTS = "events"
    GRAPH = "graph"
    HOT = "hot"


Choice = TypeVar("Choice", bound=Enum)

#: The log's level for each value of SAFETUNE_LOG. Without the variable the program sets it.
LOG_LEVELS = {"quiet": logging.ERROR, "info": logging.INFO, "debug": logging.DEBUG}


def parse_choice(kind: type[Choice], name: str, value: str) -> Choice:
    """Return the member of `kind` with this value; raises `InvalidSetting` with the valid ones."""
    return _parse_named({member.value: member for member in kind}, name, value)


def _parse_named(values: Mapping[str, Any], name: str, value: str) -> Any:
    if not isinstance(value, str) or value not in values:
        raise InvalidSetting(f"{name}={value!r} is not valid; use one of: {', '.join(values)}")
    return values[value]


def check_flag(name: str, value: object) -> bool:
    """Return a value that is True or False; raises `InvalidSetting` for any other."""
    if not isinstance(value, bool):
        raise InvalidSetting(f"{name}={value!r} is not valid; use True or False")
    return value


_SIZE = re.compile(r"([0-9]+)\s*(?:([KMG])(?:iB)?)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(name: str, value: str) -> int:
    """Return a size in bytes from text such as `4096` or `512MiB`; raises `InvalidSetting`."""
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise InvalidSetting(
            f"{name}={value!r} is not a size; give bytes, or a number with KiB, MiB or GiB"
        )
    return int(match[1]) * _UNITS[(match[2] or "").upper()]


def parse_seconds(name: str, value: str) -> float:
    """Return a nonnegative number of seconds; raises `InvalidSetting`."""
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


def parse_kernels(name: str, value: str) -> frozenset[str]:
    """Return the names in `module.kernel,...`, where `*` is any text; raises `InvalidSetting`."""
    names = frozenset(part.strip() for part in value.split(",") if part.strip())
    if wrong := sorted(part for part in names if not re.fullmatch(r"[\w.<>*?]+", part)):
        raise InvalidSetting(
            f"{name} has {wrong[0]!r}, which is not the name of a kernel; give my_kernel, "
            "my_package.my_module.my_kernel, or my_package.* for a whole package"
        )
    return names


@dataclass(frozen=True)
class SearchBudget:
    """The limit of the search for one key: a total number of configs, or seconds per search."""

    configs: int | None = None
    seconds: float = math.inf

    @classmethod
    def parse(cls, owner: str, budget: object) -> SearchBudget | None:
        """Parse a budget: `200` configs, or a time such as `90s`, `5m` or `1h`.

        None, for all configs, stays None.

        Raises:
            InvalidSetting: it is neither; the message names `owner`.
        """
        if budget is None or isinstance(budget, cls):
            return budget
        text = "" if isinstance(budget, bool) else str(budget).strip()
        match = re.fullmatch(r"(\d+|\d*\.\d+)([smh]?)", text)
        number = float(match[1]) if match else 0.0
        if match and match[2] and 0 < number < math.inf:
            return cls(seconds=number * _UNITS_S[match[2]])
        if match and number >= 1 and number.is_integer():
            return cls(configs=int(number))
        raise InvalidSetting(
            f"budget={budget!r} of {owner} is neither a number of configs, e.g. 200, nor a time, "
            "e.g. '90s', '5m' or '1h'"
        )

    def remaining(self, tried: int, new: int, elapsed_s: float) -> int:
        """Return how many configs may still be measured; for a budget in seconds, at the rate so
        far.

        Args:
            tried, new: the configs with an outcome, and those tried in `elapsed_s`.
        """
        if self.configs is not None:
            return self.configs - tried
        return int((self.seconds - elapsed_s) * new / elapsed_s) if new else sys.maxsize


_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


class SharedKind(str, Enum):
    """The kinds of shared stores."""

    DIRECTORY = "directory"
    POSTGRES = "postgres"
    OBJECTS = "objects"


def shared_kind(url: str) -> SharedKind:
    """Return the kind of shared store that a URL names; fsspec opens every scheme except ours."""
    scheme = url.partition("://")[0]
    if scheme in ("postgresql", "postgres"):
        return SharedKind.POSTGRES
    return SharedKind.DIRECTORY if scheme == "file" else SharedKind.OBJECTS


def check_url(name: str, url: str) -> str:
    """Return the URL of a shared store; raises `InvalidSetting`.

    Checks only its form, so that reading the settings imports nothing.
    """
    if not _SHARED_URL.fullmatch(url):
        raise InvalidSetting(
            f"{name}={display_url(url)!r} is not the URL of a shared store; give "
            "file:///directory, postgresql://host/database, or a URL that fsspec knows, such as "
            "s3://bucket/folder"
        )
    return url


#: Where a URL may be empty after its scheme, the driver has a default. The path of a file is
#: absolute.
_SHARED_URL = re.compile(
    r"(postgres|postgresql|memory)://.*|file:///.*|(?!file:)[a-z][a-z0-9+.-]*://.+", re.IGNORECASE
)


def display_url(url: str) -> str:
    """Return a URL for messages: without user, password and parameters.

    A password may contain any character; if its end is ambiguous, the URL is not shown.
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


#: The meaning of the usual SQLSTATEs of a server; the class of any other error says what it is.
_REFUSALS = {
    "25006": "the server is read-only",
    "28P01": "the server rejected the password",
    "3D000": "the server has no such database",
    "42501": "permission denied",
    "53100": "the server has no disk space left",
    "53300": "the server has no connections left",
}


#: The same without a connection, and so without an SQLSTATE, by a part of the driver's text.
_NO_CONNECTION = {
    "Connection refused": "nothing is listening there",
    "too many clients": _REFUSALS["53300"],
    "password authentication failed": _REFUSALS["28P01"],
    "role ": "unknown user",
    "database ": _REFUSALS["3D000"],
    "certificate": "its certificate is missing or not accepted",
    "SSL": "the server and this process disagree about SSL",
    "timeout": "it does not answer in time",
    "translate host name": "unknown host",
}


def driver_error(error: BaseException) -> str:
    """Return a driver's error for messages: our own sentence, its class and its SQLSTATE.

    Its own text may contain part of the password, mistaken for something else.
    """
    code, number = getattr(error, "sqlstate", None), getattr(error, "errno", None)
    if isinstance(number, int):
        sentence = os.strerror(number)
    elif code:
        sentence = _REFUSALS.get(str(code), "")
    else:
        text = str(error)
        sentence = next((ours for part, ours in _NO_CONNECTION.items() if part in text), "")
    name = f"{type(error).__name__} {code}" if code else type(error).__name__
    return f"{sentence} ({name})" if sentence else name


@dataclass(frozen=True)
class Settings:
    """The process-wide settings; docs/configuration.md describes the variables."""

    cache_dir: Path
    mode: Mode = Mode.TUNE
    phantom: PhantomPolicy = PhantomPolicy.DROP
    copy_limit: int = 2 << 30  # in bytes
    #: WORLD_SIZE, which torchrun sets, or that of torch.distributed where it is initialised. Over
    #: 1, a process keeps the config that it launched for a key until `safetune.sync()`.
    world_size: int = 1
    packs: tuple[Path, ...] = ()  # directories, in the order of the search
    wait_s: float = 120.0  # that this process waits in total for tunings of other processes
    shared: str = ""  # a URL; empty for none
    local_world_size: int = 1  # LOCAL_WORLD_SIZE, of torchrun: the processes on this node
    on_miss: MissPolicy | None = None  # None: as the mode says
    fast_launch: bool = True
    leave: frozenset[str] = frozenset()  # the kernels that are left to Triton
    budget: SearchBudget | None = None  # of kernels without one of their own
    failures: Path | None = None  # a list of configs that are not tried
    log_level: int | None = None  # None: the program's
    measure: MeasurePolicy | None = None  # None: not given, and as GRAPH
    same_bits: bool = False

    def same_bits_of(self, same_bits: bool | None) -> bool:
        """Return whether a tuner with this `same_bits` requires the bits of its first config."""
        return self.same_bits if same_bits is None else same_bits

    def tunes(self, on_miss: MissPolicy | None) -> bool:
        """Whether a tuner with this `on_miss` tunes keys, at once or in the background."""
        tuned = self.mode in (Mode.TUNE, Mode.BACKGROUND)
        return tuned and (on_miss or self.on_miss) in (None, MissPolicy.WARN)

    @classmethod
    def current(cls) -> Settings:
        """Read the environment; raises `InvalidSetting` for an invalid value."""
        configured = tuple(_configured.items())
        group = distributed()  # srun and MPI set no WORLD_SIZE
        ranks = 1 if group is None else int(group.get_world_size())
        found = _settings(tuple(map(os.environ.get, _READ)), ranks, configured)
        if found.log_level != _log_level_set:
            _set_log_level(found.log_level)
        return found


def distributed() -> Any:
    """Return torch.distributed if the program has initialised it; None otherwise. Imports
    nothing.
    """
    found = sys.modules.get("torch.distributed")
    # The function is missing in builds of torch without it, and during the import.
    return found if getattr(found, "is_initialized", bool)() else None


#: The level that SAFETUNE_LOG has set; the program may set another one then.
_log_level_set: int | None = None


def _set_log_level(level: int | None) -> None:
    global _log_level_set
    _log_level_set = level
    logger.setLevel(logging.NOTSET if level is None else level)


#: The fields that apply if the environment does not set them.
_configured: dict[str, Any] = {}


def configure(
    *,
    mode: str | None = None,
    on_miss: str | None = None,
    measure: str | None = None,
    same_bits: bool | None = None,
) -> None:
    """Set the mode or a policy of this process, unless the environment sets it.

    It applies to all launches whose config is not decided yet. The last call counts; an omitted
    argument changes nothing.

    Args:
        mode: like SAFETUNE_MODE. With `off`, a launch uses the first config that pruning leaves,
            and safetune looks up, stores and starts nothing.
        on_miss: like SAFETUNE_ON_MISS.
        measure: like SAFETUNE_MEASURE.
        same_bits: like SAFETUNE_SAME_BITS.

    Raises:
        InvalidSetting: unknown mode or policy.
    """
    global _configured
    given = checked_policies(mode=mode, on_miss=on_miss, measure=measure, same_bits=same_bits)
    _configured = {**_configured, **given}


#: What `configure` sets, and the checks of the values. A tuner has those after the mode, too.
_POLICIES: dict[str, Callable[[str, Any], Any]] = {
    "mode": functools.partial(parse_choice, Mode),
    "on_miss": functools.partial(parse_choice, MissPolicy),
    "measure": functools.partial(parse_choice, MeasurePolicy),
    "same_bits": check_flag,
}


def checked_policies(**given: str | bool | None) -> dict[str, Any]:
    """Return the values that are not None, as `Settings` has them; raises `InvalidSetting`."""
    return {n: _POLICIES[n](n, value) for n, value in given.items() if value is not None}


_parse_switch = functools.partial(_parse_named, {"0": False, "1": True})


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return os.sep


#: A relative directory in a variable is below this one, wherever the program goes later.
_START = _working_directory()


def _directory(name: str, value: str) -> Path:
    """Return a directory as an absolute path; unchanged if its home directory does not exist."""
    path = os.path.expanduser(value)
    return Path(path if path.startswith("~") else os.path.normpath(os.path.join(_START, path)))


def _directories(name: str, value: str) -> tuple[Path, ...]:
    return tuple(_directory(name, part) for part in value.split(os.pathsep) if part)


#: The variables: the field of `Settings` that each sets, and its parser.
_FIELDS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "SAFETUNE_BUDGET": ("budget", SearchBudget.parse),
    "SAFETUNE_CACHE_DIR": ("cache_dir", _directory),
    "SAFETUNE_COPY_LIMIT": ("copy_limit", parse_size),
    "SAFETUNE_FAILURES": ("failures", _directory),
    "SAFETUNE_FAST_LAUNCH": ("fast_launch", _parse_switch),
    "SAFETUNE_LEAVE": ("leave", parse_kernels),
    "SAFETUNE_LOG": ("log_level", functools.partial(_parse_named, LOG_LEVELS)),
    "SAFETUNE_MEASURE": ("measure", _POLICIES["measure"]),
    "SAFETUNE_MODE": ("mode", _POLICIES["mode"]),
    "SAFETUNE_ON_MISS": ("on_miss", _POLICIES["on_miss"]),
    "SAFETUNE_PACKS": ("packs", _directories),
    "SAFETUNE_PHANTOM": ("phantom", functools.partial(parse_choice, PhantomPolicy)),
    "SAFETUNE_SAME_BITS": ("same_bits", _parse_switch),
    "SAFETUNE_SHARED": ("shared", check_url),
    "SAFETUNE_WAIT": ("wait_s", parse_seconds),
}

#: Every variable that is read here or by the tests.
VARIABLES = frozenset(
    {
        *_FIELDS,
        "SAFETUNE_INSTALL",
        *(f"SAFETUNE_TEST_{name}" for name in ("EXAMPLES", "FULL", "LAUNCHES", "TENTH")),
    }
)

#: All variables that the settings depend on; torch.distributed and `configure` come on top.
_READ = (*_FIELDS, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "HOME", "XDG_CACHE_HOME")


@functools.lru_cache(maxsize=16)
def _settings(
    values: tuple[str | None, ...], ranks: int, configured: tuple[tuple[str, Any], ...]
) -> Settings:
    """Return the settings for the values of `_READ`: a library has hundreds of tuners."""
    if unknown := {n for n in os.environ if n.startswith("SAFETUNE_")} - VARIABLES:
        text = f"ignoring unknown setting {with_nearest(sorted(unknown), VARIABLES)}"
        warn_once(text, SettingWarning)
    given = {name: value for name, value in zip(_READ, values, strict=True) if value}
    world_size = max(_number(given, "WORLD_SIZE", 1), ranks)
    fields = {
        "world_size": world_size,
        "local_world_size": _number(given, "LOCAL_WORLD_SIZE", world_size),
        **dict(configured),
    }
    for name, (field, parse) in _FIELDS.items():
        if name in given:
            fields[field] = parse(name, given[name])
    if "cache_dir" not in fields:
        fields["cache_dir"] = _directory("", _default_cache_dir())
    return Settings(**fields)


def installs() -> bool:
    """Return whether SAFETUNE_INSTALL asks to replace every `triton.autotune`."""
    return _parse_switch("SAFETUNE_INSTALL", os.environ.get("SAFETUNE_INSTALL") or "0")


#: `safetune run --keep` hands its pairs to every process of the program. It is not for users.
RUN_KEEP = "_SAFETUNE_RUN_KEEP"


def kept_by_run() -> frozenset[tuple[str, str]]:
    """Return the pairs that `safetune run --keep` was given."""
    return parse_keep("--keep", os.environ.get(RUN_KEEP, ""))


def _number(given: Mapping[str, str], name: str, default: int) -> int:
    """Return the number in a launcher's variable."""
    text = given.get(name, str(default))
    if not (text.isdecimal() and int(text) > 0):
        text = f"{name}={text!r} is not a positive integer; using {default}"
        warn_once(text, SettingWarning)
        return default
    return int(text)


def _default_cache_dir() -> str:
    import platformdirs  # most clusters set SAFETUNE_CACHE_DIR

    try:
        return platformdirs.user_cache_dir("safetune", appauthor=False)
    except RuntimeError:  # without a home directory; opening the store reports it
        return os.path.join("~", ".cache", "safetune")

"""The state of each key of one tuner: untried, a choice, a fallback, or only captured in a graph.

`KeyState.decision` alone says which config a key launches now, and why. Two dictionaries follow
from the states, and every change updates them: `KeyStates.hits`, which the path of a known launch
reads, and `KeyStates.choices`, which users see as `tuner.cache`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from triton.runtime.autotuner import Config

from safetune import forks
from safetune.config import config_text
from safetune.frozen import dataclass
from safetune.messages import counted, logger

if TYPE_CHECKING:
    from safetune.keys.tuning_key import TuningKey
    from safetune.settings import Settings

#: Computes what decides which binary a call needs: see `call_shape.specialisation`.
Specialise = Callable[[], Any]

#: Held while a state and the two dictionaries change together, and no longer: a call under capture
#: must not wait for a thread that tunes the key. Also held around a fork.
_changing = threading.Lock()


class Reason(Enum):
    """Why a key launches a config."""

    CHOICE = "choice"
    FALLBACK = "fallback"
    CAPTURED = "captured"


class Retry(Protocol):
    """When tuning is tried again for a key that has a fallback."""

    def due(self, settings: Settings) -> bool:
        """Whether tuning should be tried again now."""


@dataclass(frozen=True)
class Decision:
    """The config that a key launches now."""

    config: Config
    reason: Reason
    retry: Retry | None = None  # for a fallback that lasts until tuning is tried again

    @property
    def lasting(self) -> bool:
        """Whether the next launch needs neither the store nor a tuning."""
        return self.retry is None and self.reason is not Reason.CAPTURED


@dataclass(frozen=True)
class Asked:
    """The tuning key behind a memory key, without the arguments of any call."""

    key: TuningKey
    declared: str  # digest over the declared list of configs
    configs: Mapping[str, Config]  # those that pruning left, by digest

    @property
    def identity(self) -> str:
        """The key and the list of configs: processes that share both launch the same config."""
        return f"{self.key.digest} {self.declared}"


class KeyState:
    """One memory key of one tuner."""

    def __init__(self, key: Any, states: KeyStates) -> None:
        self.key = key
        #: Held by the thread that looks for a choice, so that a key is tuned once.
        self.lock = threading.RLock()
        #: A choice that waits for `safetune.sync`, which all ranks call together.
        self.held: Config | None = None
        #: The tuning key and configs behind the memory key, for `safetune.sync`.
        self.asked: Asked | None = None
        self.captured: CapturedMiss | None = None
        self._states = states
        self._choice: Config | None = None
        self._fallback: Config | None = None
        self._retry: Retry | None = None
        self._rejected: dict[Any, list[Config]] = {}
        self._substitutes: dict[Any, Config | Exception] = {}

    @property
    def tuner(self) -> Any:
        """The tuner whose key this is."""
        return self._states.tuner

    def decision(self, capture: int | None = 0) -> Decision | None:
        """Return the config that this key launches now; None where a call has to look for one.

        A call that cannot launch this config has another one: see `allowed`.

        Args:
            capture: the number of the capture under way, 0 outside of one. A captured config counts
                for its own capture; None counts that of any.
        """
        choice, fallback, retry = self._choice, self._fallback, self._retry
        captured = self.captured
        if choice is not None:
            return Decision(choice, Reason.CHOICE)
        if fallback is not None and (retry is None or not capture):
            return Decision(fallback, Reason.FALLBACK, retry)
        if captured is not None and capture in (None, captured.capture):
            return Decision(captured.config, Reason.CAPTURED)
        return None

    def allowed(self, config: Config, specialise: Specialise) -> Config:
        """Return `config`, or the one in its place for a call that cannot launch it.

        Raises:
            Exception: the last error, where none can be launched.
        """
        if not self._rejected:
            return config
        specialisation = specialise()
        if config not in self._rejected.get(specialisation, ()):
            return config
        substitute = self._substitutes.get(specialisation, config)
        if isinstance(substitute, Exception):
            raise without_frames(substitute)
        return substitute

    def set_choice(self, config: Config) -> Config:
        """Launch `config` as the key's choice from here on; return it."""
        with _changing:
            self._choice, self._fallback, self._retry, self.held = config, None, None, None
            outdated = self.captured
            if outdated is not None and outdated.config != config:
                self.captured = None  # another thread may set a choice too: one of them warns
            else:
                outdated = None
            self._states.publish(self, self._choice, self._choice)
        if outdated is not None:
            outdated.warn_outdated(config)
        return config

    def set_fallback(self, config: Config, retry: Retry | None = None) -> Config:
        """Launch `config` for want of a choice, until tuning is tried again; return it."""
        with _changing:
            self._fallback, self._retry = config, retry
            if self._choice is None:
                self._states.publish(self, config if retry is None else None, None)
        return config

    def hold(self, config: Config) -> None:
        """Launch the fallback for good, until `safetune.sync` adopts `config` as the choice."""
        assert self._fallback is not None
        self.set_fallback(self._fallback)
        self.held = config

    def forget(self) -> None:
        """Have the next call look for a config; what graphs have captured stays known."""
        with _changing:
            self._choice = self._fallback = self._retry = self.held = None
            self._rejected, self._substitutes = {}, {}
            self._states.publish(self, None, None)

    def reject(self, specialisation: Any, config: Config) -> list[Config]:
        """Note that a call cannot launch `config`; return all that such calls cannot launch."""
        with _changing:
            rejected = self._rejected.setdefault(specialisation, [])
            if config not in rejected:
                rejected.append(config)
            lasting = self._fallback if self._retry is None else None
            self._states.publish(self, self._choice or lasting, self._choice)
        return rejected

    def substitute(self, specialisation: Any, found: Config | Exception) -> None:
        """Note what such calls launch instead, or the error, where they can launch none."""
        self._substitutes[specialisation] = found

    def launches_always(self, config: Config) -> bool:
        """Whether no call has been unable to launch `config`."""
        return not any(config in rejected for rejected in self._rejected.values())


@dataclass(frozen=True)
class CapturedMiss:
    """A key that had no choice when a graph captured a launch of it.

    Attributes:
        kernel: its name.
        key: in readable form.
        config: the config that the graph launches at every replay.
        capture: the driver's number of the capture.
        graph: the name given to `safetune.graph`, or the number.
    """

    kernel: str
    key: str
    config: Config
    capture: int
    graph: str
    state: weakref.ref[KeyState] = field(repr=False, compare=False)

    @property
    def choice(self) -> Config | None:
        """The key's choice now; None while this process has no choice."""
        decision = self._decision()
        return None if decision is None or decision.reason is not Reason.CHOICE else decision.config

    @property
    def outdated(self) -> bool:
        """Whether capturing the graph again would give it another config."""
        decision = self._decision()
        return decision is not None and decision.lasting and decision.config != self.config

    def _decision(self) -> Decision | None:
        state = self.state()
        return None if state is None else state.decision()

    def warn_outdated(self, choice: Config) -> None:
        """Log that the graph keeps its config although the key has another choice now."""
        logger.warning(
            "%s now has a choice for %s, %s; graph %r was captured with %s and keeps that "
            "config: capture it again",
            self.kernel,
            self.key,
            config_text(choice),
            self.graph,
            config_text(self.config),
        )


class KeyStates:
    """The states of all keys of one tuner, and the dictionaries that follow from them."""

    def __init__(self, tuner: Any) -> None:
        self.tuner = tuner  # whose keys these are; a shallow copy of it shares them
        #: The config of each key that every call launches without a miss.
        self.hits: dict[Any, Config] = {}
        #: The chosen config of each key; as `tuner.cache`, open to users.
        self.choices = Choices(self)
        self._states: dict[Any, KeyState] = {}
        _all[self] = None

    def of(self, key: Any) -> KeyState:
        """Return the state of a key, untried if it is new."""
        state = self._states.get(key)
        return state or self._states.setdefault(key, KeyState(key, self))

    def __iter__(self) -> Iterator[KeyState]:
        return iter(list(self._states.values()))

    def __str__(self) -> str:
        reasons = [decision.reason for state in self if (decision := state.decision())]
        chosen = reasons.count(Reason.CHOICE)
        without = f" and {len(reasons) - chosen} without" if len(reasons) > chosen else ""
        configs = counted(len(self.tuner.configs), "config")
        return f"{configs}, {counted(chosen, 'key')} with a choice{without}"

    def clear(self) -> None:
        """Make every key untried."""
        for state in self:
            state.forget()
        self.tuner.forget_launches()

    def replace_choices(self, choices: Mapping[Any, Config]) -> None:
        """Make these the choices, and every other key untried."""
        choices = dict(choices)
        self.clear()
        self.choices.update(choices)

    def publish(self, state: KeyState, config: Config | None, choice: Config | None) -> None:
        """Bring the dictionaries up to date with one state; called while `_changing` is held."""
        key = state.key
        if choice is None:
            dict.pop(self.choices, key, None)
        else:
            dict.__setitem__(self.choices, key, choice)
        before = self.hits.get(key)
        if config is None or not state.launches_always(config):
            self.hits.pop(key, None)
            config = None
        else:
            self.hits[key] = config
        if before is not None and before is not config:
            self.tuner.forget_launches()

    def start_over(self) -> None:
        """In a forked child: drop the locks of threads that it does not have."""
        for state in self:
            state.lock = threading.RLock()
        self.tuner.forget_launches()  # Triton refuses each launch

    def __getstate__(self) -> tuple[Any, dict[Any, Config]]:
        return self.tuner, dict(self.choices)

    def __setstate__(self, state: tuple[Any, dict[Any, Config]]) -> None:
        tuner, choices = state
        self.__init__(tuner)  # type: ignore[misc]
        self.choices.update(choices)


class Choices(dict[Any, Config]):
    """`tuner.cache`: the choice of each key, never a fallback. A write changes the key's state."""

    def __init__(self, states: KeyStates) -> None:
        super().__init__()
        self._states = states

    def __setitem__(self, key: Any, config: Config) -> None:
        self._states.of(key).set_choice(config)

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        self._states.of(key).forget()

    def clear(self) -> None:
        """Make every key untried, those with a fallback too."""
        self._states.clear()

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove a choice and return it."""
        if key not in self and default:
            return default[0]
        config = self[key]
        del self[key]
        return config

    def popitem(self) -> tuple[Any, Config]:
        """Remove the newest choice and return it with its key."""
        for key in reversed(self):
            return key, self.pop(key)
        raise KeyError("popitem(): dictionary is empty")

    def __ior__(self, other: Any) -> Choices:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy belongs to no tuner, and can be written to a file

    setdefault = MutableMapping.setdefault  # type: ignore[assignment]
    update = MutableMapping.update  # type: ignore[assignment]


#: Ordered: where two tuners have one key, `safetune.sync` asks the older one first.
_all: weakref.WeakKeyDictionary[KeyStates, None] = weakref.WeakKeyDictionary()


def all_states() -> Iterator[KeyState]:
    """Yield the state of every key of every tuner of this process, oldest tuner first."""
    for states in list(_all):
        yield from states


def without_frames(error: Exception) -> Exception:
    """Return a copy to keep: a traceback would keep its frames, and with them tensors."""
    copied = type(error).__new__(type(error))
    copied.__dict__.update(error.__dict__)
    copied.args = error.args
    return copied


def _after_fork_in_child() -> None:
    _changing.release()
    for states in list(_all):
        states.start_over()


forks.register(
    "launches",
    before=_changing.acquire,
    after_in_parent=_changing.release,
    after_in_child=_after_fork_in_child,
)

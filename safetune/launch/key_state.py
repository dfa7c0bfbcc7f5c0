"""The state of each key of one tuner: untried, a choice, a fallback, or only captured in a graph.

`KeyState.decision` alone says which config a key launches now, and why. Two things are derived from
it and updated by every change: `KeyState.hit`, which the path of a known launch reads, and
`KeyStates.choices`, which users see as `tuner.cache`, under Triton's keys.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import field
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from triton.runtime.autotuner import Config

from safetune import forks
from safetune.config import config_text
from safetune.errors import InvalidConfig
from safetune.frozen import dataclass
from safetune.keys.tuning_key import Layout, Meaning, guessed, plain
from safetune.messages import counted, logger

if TYPE_CHECKING:
    from safetune.keys.tuning_key import TuningKey

Raised = TypeVar("Raised", bound=Exception)

#: Computes the properties of a call that select a binary: see `call_shape.specialisation`.
Specialise = Callable[[], Any]

#: Held while a state and the two dictionaries change together, and no longer: a call under capture
#: must not wait for a thread that tunes the key. Also held around a fork.
_changing = threading.Lock()


class Reason(Enum):
    """Why a key launches a config."""

    WRITTEN = "written"  # into `tuner.cache`, by the program
    CHOICE = "choice"
    FALLBACK = "fallback"
    CAPTURED = "captured"


class _AtOnce:
    """A retry at the next call."""

    kinds = frozenset[Any]()

    def holds(self, args: Any, kwargs: Any, settings: Any, capture: int) -> bool:
        """Return False: the call looks for a config."""
        return False


_LOOK_AGAIN = _AtOnce()


@dataclass(frozen=True)
class Decision:
    """The config that a key launches now."""

    config: Config
    reason: Reason
    retry: Any = None  # a `failures.Retry`, for a fallback that lasts until tuning is tried again

    @property
    def lasting(self) -> bool:
        """Whether the next launch needs neither the store nor a tuning."""
        for_good = self.retry is None or bool(self.retry.kinds)
        return for_good and self.reason is not Reason.CAPTURED


@dataclass(frozen=True)
class Asked:
    """The tuning key behind a memory key, without the arguments of any call."""

    key: TuningKey
    declared: str  # digest over the declared list of configs
    configs: Mapping[str, Config]  # those that pruning left, by digest

    @property
    def identity(self) -> str:
        """The key and the list of configs; processes that share both launch the same config."""
        return f"{self.key.digest} {self.declared}"


class KeyState:
    """One memory key of one tuner."""

    def __init__(self, key: Any, states: KeyStates) -> None:
        self.key = key
        #: The config that every call of the key launches without a miss.
        self.hit: Config | None = None
        #: Held by the thread that looks for a choice, so that a key is tuned once.
        self.lock = threading.RLock()
        #: A choice that waits for `safetune.sync`, which all ranks call together.
        self.held: Config | None = None
        #: The tuning key and configs behind the memory key, for `safetune.sync`.
        self.asked: Asked | None = None
        self.captured: CapturedMiss | None = None
        #: The last failed attempt to tune, and the calls with which no config works.
        self.retried: Any = None
        self.hopeless: Any = None
        #: What the program has written into `tuner.cache` for the key: launched whatever is chosen.
        self.written: Config | None = None
        #: The key in `tuner.cache` and its meaning; None before a call has missed it.
        self.shown: Any = key
        self.meaning: Meaning | None = None
        self._states = states
        self._choice: Config | None = None
        self._fallback: Config | None = None
        self._retry: Any = None
        self._rejected: dict[Any, list[Config]] = {}
        self._substitutes: dict[Any, Config | Exception] = {}

    @property
    def tuner(self) -> Any:
        """The tuner whose key this is."""
        return self._states.tuner

    def decision(self, capture: int | None = 0) -> Decision | None:
        """Return the config that this key launches now; None if a call must look for one.

        A call that cannot launch this config gets another one: see `allowed`.

        Args:
            capture: the number of the capture under way, 0 outside of one. A captured config counts
                for its own capture only; with None, for any capture.
        """
        choice, fallback, retry = self._choice, self._fallback, self._retry
        captured = self.captured
        if self.written is not None:
            return Decision(self.written, Reason.WRITTEN)
        if choice is not None:
            return Decision(choice, Reason.CHOICE)
        if fallback is not None and (retry is None or retry.kinds or not capture):
            return Decision(fallback, Reason.FALLBACK, retry)
        if captured is not None and capture in (None, captured.capture):
            return Decision(captured.config, Reason.CAPTURED)
        return None

    def allowed(self, config: Config, specialise: Specialise) -> Config:
        """Return `config`, or its substitute for a call that cannot launch it.

        Raises:
            Exception: the last error, if none can be launched.
        """
        if not self._rejected or self.written is not None:
            return config
        specialisation = specialise()
        if config not in self._rejected.get(specialisation, ()):
            return config
        substitute = self._substitutes.get(specialisation, config)
        if isinstance(substitute, Exception):
            raise without_frames(substitute)
        return substitute

    def set_choice(self, config: Config) -> Config:
        """Use `config` as the key's choice from now on; return it, or the written config."""
        with _changing:
            self._choice, self._fallback, self._retry, self.held = config, None, None, None
            self.retried = self.hopeless = None
            outdated = self.captured
            if outdated is not None and outdated.config != config:
                self.captured = None  # another thread may set a choice too: one of them warns
            else:
                outdated = None
            self._states.publish(self)
        if outdated is not None:
            outdated.warn_outdated(config)
        return self.written or config

    def write(self, config: Config) -> None:
        """Use the config that the program has written into `tuner.cache`."""
        with _changing:
            self.written = config
            self._states.publish(self)

    def set_fallback(self, config: Config, retry: Any = None) -> Config:
        """Use `config` as a fallback until the next tuning attempt; return it."""
        with _changing:
            self._fallback, self._retry = config, retry
            self._states.publish(self)
        return config

    def look_again(self) -> None:
        """Let the next call look for a choice again if the key has a permanent fallback."""
        with _changing:
            if self._fallback is not None and self._retry is None:
                self._retry = _LOOK_AGAIN
                self._states.publish(self)

    def hold(self, config: Config) -> None:
        """Use the fallback permanently, until `safetune.sync` adopts `config` as the choice."""
        assert self._fallback is not None
        self.set_fallback(self._fallback)
        self.held = config

    def forget(self) -> None:
        """Let the next call look for a config; configs in captured graphs stay known."""
        with _changing:
            self._choice = self._fallback = self._retry = self.held = self.written = None
            self.retried = self.hopeless = None
            self._rejected, self._substitutes = {}, {}
            self._states.publish(self)

    def reject(self, specialisation: Any, config: Config) -> list[Config]:
        """Record that a call cannot launch `config`; return all configs that such calls cannot
        launch.
        """
        with _changing:
            rejected = self._rejected.setdefault(specialisation, [])
            if config not in rejected:
                rejected.append(config)
            self._states.publish(self)
        return rejected

    def substitute(self, specialisation: Any, found: Config | Exception) -> None:
        """Record the config that such calls launch instead, or the error if there is none."""
        self._substitutes[specialisation] = found

    @property
    def choice(self) -> Config | None:
        """The config in `tuner.cache`: never a fallback."""
        return self.written or self._choice

    def update_hit(self) -> bool:
        """Set `hit`; return whether it had another config before."""
        before, config = self.hit, self.choice or (self._fallback if self._retry is None else None)
        if config is not None and self.written is None:
            rejected = any(config in configs for configs in self._rejected.values())
            config = None if rejected else config
        self.hit = config
        return before is not None and before is not config


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
    def outdated(self) -> bool:
        """Whether capturing the graph again would give it another config."""
        state = self.state()
        decision = None if state is None else state.decision()
        return decision is not None and decision.lasting and decision.config != self.config

    def warn_outdated(self, choice: Config) -> None:
        """Log that the graph still launches its config although the key has another choice now."""
        logger.warning(
            "%s now has a choice for %s: %s; graph %r was captured with %s, which it still "
            "launches: capture it again",
            self.kernel,
            self.key,
            config_text(choice),
            self.graph,
            config_text(self.config),
        )


class KeyStates:
    """The states of all keys of one tuner, and the dictionaries derived from them."""

    def __init__(self, tuner: Any) -> None:
        self.tuner = tuner  # whose keys these are; a shallow copy of it shares them
        #: The chosen config of each key, under Triton's key; as `tuner.cache`, open to users.
        self.choices = Choices(self)
        self._states: dict[Any, KeyState] = {}
        #: All that the program has written, by the key that it wrote; the newest comes last.
        self._written: dict[Any, Config] = {}
        self._layouts: dict[Layout, None] = {}
        #: The keys in `_written` by their meaning, for each layout that was asked for.
        self._tables: dict[Layout, dict[Meaning | None, Any]] = {}
        self._by_meaning: dict[Meaning, list[KeyState]] = {}
        _all[self] = None

    def of(self, key: Any) -> KeyState:
        """Return the state of a key; a new key is untried."""
        state = self._states.get(key)
        return state or self._states.setdefault(key, KeyState(key, self))

    def __iter__(self) -> Iterator[KeyState]:
        return iter(list(self._states.values()))

    def __str__(self) -> str:
        reasons = [decision.reason for state in self if (decision := state.decision())]
        chosen = sum(reason in (Reason.CHOICE, Reason.WRITTEN) for reason in reasons)
        without = f" and {len(reasons) - chosen} without" if len(reasons) > chosen else ""
        configs = counted(len(self.tuner.configs), "config")
        return f"{configs}, {counted(chosen, 'key')} with a choice{without}"

    def missed(self, key: Any, arguments: Mapping[str, Any]) -> KeyState:
        """Return the state of a call's key, shown in `tuner.cache` under the call's Triton key, and
        apply the config that the program has written for it.
        """
        state = self.of(key)
        layout, meaning = self.learn(arguments)
        if state.meaning is None:
            with _changing:
                dict.pop(self.choices, state.shown, None)
                state.shown, state.meaning = layout.key(arguments), meaning
                self._by_meaning.setdefault(meaning, []).append(state)
                self.publish(state)
        if self._written and (known := self._table(layout).get(meaning)) is not None:
            if known != state.shown:
                dict.pop(self.choices, known, None)
            if self._written[known] is not state.written:
                state.write(self._written[known])
        return state

    def written(self, arguments: Mapping[str, Any]) -> Config | None:
        """Return the config that the program has written into `tuner.cache` for a call."""
        if not self._written:
            return None
        layout, meaning = self.learn(arguments)
        return self._written.get(self._table(layout).get(meaning))

    def learn(self, arguments: Mapping[str, Any]) -> tuple[Layout, Meaning]:
        """Return the layout and the meaning of a call's Triton key; remembers the layout."""
        tuner = self.tuner
        layout = Layout.of(tuner.keys, tuner.arg_names, arguments)
        self._layouts[layout] = None
        meaning = layout.meaning(layout.key(arguments), tuner.key_names)
        return layout, meaning or ()

    def _table(self, layout: Layout) -> dict[Meaning | None, Any]:
        table = self._tables.get(layout)
        if table is None:
            kept = self.tuner.key_names
            table = {layout.meaning(key, kept): key for key in self._written}
            table.pop(None, None)
            self._tables[layout] = table
        return table

    def _meanings(self, key: Any) -> set[Meaning]:
        """Return the meanings of a Triton key: kinds of calls may have keys of one length."""
        tuner = self.tuner
        layouts = [*self._layouts, *guessed(tuner.keys, key)]
        found = (layout.meaning(key, tuner.key_names) for layout in layouts)
        return {meaning for meaning in found if meaning is not None}

    def matching(self, key: Any) -> list[KeyState]:
        """Return the states that a Triton key stands for."""
        found = [state for state in self if state.meaning is None and state.shown == key]
        if self._by_meaning:
            for meaning in self._meanings(key):
                found += self._by_meaning.get(meaning, ())
        return found

    def shown(self, key: Any) -> Any:
        """Return the key under which `tuner.cache` shows a Triton key's meaning, or that key."""
        if dict.__contains__(self.choices, key) or not self.choices:
            return key
        for state in self.matching(key):
            if state.choice is not None:
                return state.shown
        meanings = self._meanings(key)
        return next((other for other in self._written if meanings & self._meanings(other)), key)

    def write(self, key: Any, config: Config) -> None:
        """Launch a config for all calls that a Triton key stands for, from now on."""
        self._written.pop(key, None)
        self._written[key] = config
        self._tables = {}
        states = self.matching(key)
        for state in states:
            state.write(config)
        if not states:
            dict.__setitem__(self.choices, key, config)

    def remove(self, key: Any) -> None:
        """Make all calls that a Triton key stands for untried."""
        meanings = self._meanings(key)
        for other in list(self._written):
            if other == key or meanings & self._meanings(other):
                del self._written[other]
                dict.pop(self.choices, other, None)
        self._tables = {}
        for state in self.matching(key):
            state.forget()

    def clear(self, written: bool = True) -> None:
        """Make every key untried; also those that the program has `written`.

        `written=False` keeps those, for a changed kernel or key. With `written`, each key keeps its
        meaning, so that a later write also applies to a running tuning.
        """
        kept = {} if written else self._written
        self._written, self._tables = {}, {}
        for state in self:
            state.forget()
            if not written:
                state.shown, state.meaning = state.key, None
        if not written:
            self._layouts, self._by_meaning = {}, {}
        dict.clear(self.choices)
        for key, config in kept.items():
            self.write(key, config)
        self.tuner.forget_launches()

    def replace_choices(self, choices: Mapping[Any, Config]) -> None:
        """Make these the choices, and every other key untried."""
        choices = dict(choices)
        # A program may hold the old ones, to put them back.
        former, self.choices = self.choices, Choices(self)
        former.__class__ = _Former  # type: ignore[assignment]
        self.clear()
        self.choices.update(choices)

    def publish(self, state: KeyState) -> None:
        """Update the dictionaries from one state; called while `_changing` is held."""
        peers = self._by_meaning.get(state.meaning, ()) if state.meaning is not None else ()
        same = [peer.choice for peer in peers if peer.shown == state.shown]
        choice = next(filter(None, [state.choice, *same]), self._written.get(state.shown))
        if choice is None:
            dict.pop(self.choices, state.shown, None)
        else:
            dict.__setitem__(self.choices, state.shown, choice)
        if state.update_hit():
            self.tuner.forget_launches()

    def start_over(self) -> None:
        """In a forked child: replace locks that lost threads may hold."""
        for state in self:
            state.lock = threading.RLock()
        self.tuner.forget_launches()  # Triton refuses each launch

    def __getstate__(self) -> tuple[Any, dict[Any, Config]]:
        return self.tuner, dict(self.choices)

    def __setstate__(self, state: tuple[Any, dict[Any, Config]]) -> None:
        tuner, choices = state
        self.__init__(tuner)  # type: ignore[misc]
        for key, config in choices.items():  # the tuner may be half made, so nothing is asked of it
            self._written[key] = config
            dict.__setitem__(self.choices, key, config)


class Choices(dict[Any, Config]):
    """`tuner.cache`: the choice of each key, never a fallback, under Triton's key.

    Every method takes any Triton key of a call: see `triton_keys`. Configs that a program writes
    are launched for the calls that the key stands for, and stored nowhere.
    """

    def __init__(self, states: KeyStates) -> None:
        super().__init__()
        self._states = states

    def __getitem__(self, key: Any) -> Config:
        shown = self._states.shown(plain(key))
        if not super().__contains__(shown):
            raise KeyError(key)
        return super().__getitem__(shown)

    def __setitem__(self, key: Any, config: Config) -> None:
        if not hasattr(config, "all_kwargs"):
            raise InvalidConfig(
                f"cache[{key!r}] of {self._states.tuner.base_fn.__name__} is set to {config!r} "
                f"({type(config).__name__}); it must be a triton.Config"
            )
        self._states.write(plain(key), config)

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        self._states.remove(plain(key))

    def clear(self) -> None:
        """Make every key untried, including those with a fallback."""
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

    # Those of dict would not call the methods above.
    __contains__ = MutableMapping.__contains__
    get = MutableMapping.get  # type: ignore[assignment]
    setdefault = MutableMapping.setdefault  # type: ignore[assignment]
    update = MutableMapping.update  # type: ignore[assignment]


class _Former(dict[Any, Config]):
    """Choices that a program has put others in the place of: a plain dictionary."""

    __reduce__ = Choices.__reduce__


#: Ordered: where two tuners have one key, `safetune.sync` asks the older one first.
_all: weakref.WeakKeyDictionary[KeyStates, None] = weakref.WeakKeyDictionary()


def all_states() -> Iterator[KeyState]:
    """Yield the states of all keys of all tuners of this process, oldest tuner first."""
    for states in list(_all):
        yield from states


def without_frames(error: Raised) -> Raised:
    """Return a copy that can be kept: a traceback would keep its frames, and so tensors."""
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

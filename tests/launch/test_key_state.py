"""What one key launches, and that `tuner.cache`, which users may write to, always agrees."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import triton

from safetune.errors import InvalidConfig
from safetune.keys.tuning_key import KeyNames
from safetune.launch.key_state import Choices, Decision, KeyState, KeyStates, Reason
from safetune.settings import Settings

FIRST, SECOND, THIRD = (triton.Config({"BLOCK": 16 << number}) for number in range(3))
SOON_S = 60.0


class Tuner:
    """Counts how often the launches that it knows are dropped."""

    forgotten = 0
    keys = arg_names = ("n",)
    key_names = KeyNames(("n",), {})

    def base_fn(self) -> None:
        """A kernel."""

    def forget_launches(self) -> None:
        self.forgotten += 1


class Later:
    def __init__(self, *kinds: str) -> None:
        self.kinds = frozenset(kinds)

    def holds(self, args: Any, kwargs: Any, settings: Settings, capture: int) -> bool:
        return True


class Graph:
    """A captured launch."""

    def __init__(self, config: triton.Config, capture: int) -> None:
        self.config, self.capture = config, capture
        self.warned: list[triton.Config] = []

    def warn_outdated(self, choice: triton.Config) -> None:
        self.warned.append(choice)


@pytest.fixture
def tuner() -> Tuner:
    return Tuner()


@pytest.fixture
def states(tuner: Tuner) -> KeyStates:
    return KeyStates(tuner)


@pytest.fixture
def state(states: KeyStates) -> KeyState:
    return states.of("key")


def hits(states: KeyStates) -> dict[Any, triton.Config]:
    """The configs that calls launch without a miss, by key."""
    return {state.key: state.hit for state in states if state.hit is not None}


def launched(state: KeyState, capture: int | None = 0) -> Any:
    decision = state.decision(capture)
    return None if decision is None else (decision.config, decision.reason, decision.lasting)


class TestDecision:
    def test_an_untried_key_launches_nothing(self, states: KeyStates, state: KeyState) -> None:
        assert launched(state) is None
        assert hits(states) == states.choices == {}

    def test_a_choice_ends_a_fallback(self, states: KeyStates, state: KeyState) -> None:
        state.set_fallback(FIRST)
        assert launched(state) == (FIRST, Reason.FALLBACK, True)
        assert hits(states) == {"key": FIRST}
        state.set_choice(SECOND)
        assert launched(state) == (SECOND, Reason.CHOICE, True)
        assert hits(states) == states.choices == {"key": SECOND}

    def test_a_fallback_never_takes_the_place_of_a_choice(
        self, states: KeyStates, state: KeyState
    ) -> None:
        """A background tuning that fails after `safetune.sync` has brought a choice."""
        state.set_choice(FIRST)
        state.set_fallback(SECOND, Later())
        assert launched(state) == (FIRST, Reason.CHOICE, True)
        assert hits(states) == {"key": FIRST}

    def test_what_is_written_after_a_clear_holds_for_a_tuning_under_way(
        self, states: KeyStates
    ) -> None:
        """As a program does that loads its own table, while the background tunes a key."""
        state = states.missed("key", {"n": 4})
        states.replace_choices({(4,): SECOND})
        state.set_choice(FIRST)
        assert hits(states) == {"key": SECOND}
        assert states.choices == {(4,): SECOND}
        states.choices[4,] = THIRD
        assert hits(states) == {"key": THIRD}

    def test_a_fallback_is_never_in_cache(self, states: KeyStates, state: KeyState) -> None:
        state.set_fallback(FIRST)
        assert states.choices == {}
        state.set_fallback(FIRST, Later())
        assert states.choices == {}

    def test_a_fallback_that_is_tried_again_is_a_miss_each_time(
        self, states: KeyStates, state: KeyState
    ) -> None:
        state.set_fallback(FIRST)
        state.set_fallback(FIRST, Later())
        assert launched(state) == (FIRST, Reason.FALLBACK, False)
        assert hits(states) == {}
        assert launched(state, capture=7) is None, "a graph would keep it"

    def test_a_fallback_for_kinds_of_calls_is_no_hit_and_may_be_captured(
        self, states: KeyStates, state: KeyState
    ) -> None:
        """A hit does not look at the kind; and for its kind it is for good."""
        state.set_fallback(FIRST, Later("meta"))
        assert hits(states) == {}
        assert launched(state) == launched(state, capture=7) == (FIRST, Reason.FALLBACK, True)

    def test_a_captured_config_counts_for_its_own_capture(
        self, states: KeyStates, state: KeyState
    ) -> None:
        state.captured = Graph(FIRST, 7)
        assert launched(state) is None
        assert launched(state, capture=8) is None
        assert launched(state, capture=7) == (FIRST, Reason.CAPTURED, False)
        assert launched(state, capture=None) == (FIRST, Reason.CAPTURED, False)
        assert hits(states) == {}

    def test_a_choice_that_a_graph_does_not_have_is_reported_once(self, state: KeyState) -> None:
        graph = state.captured = Graph(FIRST, 7)
        state.set_choice(FIRST)
        assert graph.warned == []
        state.set_choice(SECOND)
        state.set_choice(THIRD)
        assert graph.warned == [SECOND]

    def test_a_rejected_config_has_a_substitute_for_those_arguments_alone(
        self, states: KeyStates, state: KeyState
    ) -> None:
        state.set_choice(FIRST)
        assert state.reject("odd", FIRST) == [FIRST]
        state.substitute("odd", SECOND)
        assert state.allowed(FIRST, lambda: "odd") is SECOND
        assert state.allowed(FIRST, lambda: "even") is FIRST
        assert state.decision() == Decision(FIRST, Reason.CHOICE)
        assert hits(states) == {}, "not every call can launch it"
        assert states.choices == {"key": FIRST}
        state.set_choice(THIRD)
        assert hits(states) == {"key": THIRD}
        state.set_choice(FIRST)
        assert hits(states) == {}, "it is still rejected"

    def test_an_error_is_raised_where_no_config_can_be_launched(self, state: KeyState) -> None:
        state.set_choice(FIRST)
        state.reject("odd", FIRST)
        state.substitute("odd", ValueError("too large"))
        with pytest.raises(ValueError, match="too large"):
            state.allowed(FIRST, lambda: "odd")

    def test_specialisations_are_computed_only_where_one_was_rejected(
        self, state: KeyState
    ) -> None:
        state.set_choice(FIRST)
        assert state.allowed(FIRST, lambda: pytest.fail("not needed")) is FIRST

    def test_launches_are_forgotten_when_a_known_one_changes(
        self, tuner: Tuner, state: KeyState
    ) -> None:
        state.set_choice(FIRST)
        state.set_choice(FIRST)
        assert tuner.forgotten == 0
        state.set_choice(SECOND)
        assert tuner.forgotten == 1
        state.reject("odd", SECOND)
        assert tuner.forgotten == 2


def missed(states: KeyStates, n: Any) -> KeyState:
    """The state of a call that has no hit; its memory key is the value with its type."""
    return states.missed((n, type(n)), {"n": n})


def _delete(cache: Any) -> None:
    del cache[1,]


def _merge(cache: Any) -> None:
    cache |= {(1,): THIRD, (3,): THIRD}


#: For each method of `dict` that changes it: a call, to be made on {(1,): FIRST, (2,): SECOND}.
MUTATORS: dict[str, Callable[[Any], Any]] = {
    "__setitem__": lambda cache: cache.__setitem__((1,), THIRD),
    "__delitem__": _delete,
    "__ior__": _merge,
    "clear": lambda cache: cache.clear(),
    "pop": lambda cache: cache.pop((1,)),
    "popitem": lambda cache: cache.popitem(),
    "setdefault": lambda cache: (cache.setdefault((1,), THIRD), cache.setdefault((3,), THIRD)),
    "update": lambda cache: cache.update({(1,): THIRD, (3,): THIRD}),
}

#: Those that leave a dictionary as it is.
READERS = {
    *("__class_getitem__", "__contains__", "__eq__", "__ge__", "__getitem__", "__gt__", "__iter__"),
    *("__le__", "__len__", "__lt__", "__ne__", "__or__", "__repr__", "__reversed__", "__ror__"),
    *("__sizeof__", "copy", "fromkeys", "get", "items", "keys", "values"),
}


class TestCache:
    def test_every_method_of_dict_is_known_here(self) -> None:
        """One that a new Python adds could change the dictionary and not the states."""
        own = {name for name in vars(dict) if name not in vars(object)} | {"__repr__", "__eq__"}
        own |= {name for name in READERS if name in vars(dict)}
        assert own == READERS | set(MUTATORS)
        assert set(MUTATORS) <= vars(Choices).keys()

    @pytest.mark.parametrize("name", MUTATORS)
    def test_a_write_goes_through_to_the_states(
        self, name: str, states: KeyStates, tuner: Tuner
    ) -> None:
        plain = {(1,): FIRST, (2,): SECOND}
        for n in (1, 2):
            missed(states, n).set_choice(plain[n,])
        assert MUTATORS[name](states.choices) == MUTATORS[name](plain)
        for n in (1, 2, 3):
            missed(states, n)
        assert states.choices == {key[:1]: config for key, config in hits(states).items()} == plain
        assert list(states.choices) == list(plain)
        known = {state.key[:1]: launched(state) for state in states}
        assert {key: found[0] for key, found in known.items() if found} == plain
        assert tuner.forgotten or name == "setdefault"

    @pytest.mark.parametrize("name", MUTATORS)
    def test_before_any_call(self, name: str, states: KeyStates) -> None:
        plain = {(1,): FIRST, (2,): SECOND}
        states.choices.update(plain)
        assert MUTATORS[name](states.choices) == MUTATORS[name](plain)
        assert states.choices == plain
        assert list(states.choices) == list(plain)
        for n in (3, 2, 1):
            missed(states, n)
        assert states.choices == plain
        assert {key[:1]: config for key, config in hits(states).items()} == plain

    def test_a_write_is_for_every_state_that_it_means_and_outlasts_a_choice(
        self, states: KeyStates
    ) -> None:
        """As a key of Triton's, 1 is True and 1.0: a tuning may end after the write."""
        first = missed(states, 1)
        first.set_fallback(SECOND)
        states.choices[1,] = FIRST
        assert launched(first) == (FIRST, Reason.WRITTEN, True)
        assert first.set_choice(THIRD) is FIRST
        first.set_fallback(SECOND, Later())
        first.reject("odd", FIRST)
        assert first.allowed(FIRST, lambda: "odd") is FIRST, "as under Triton, its error is raised"
        later = [missed(states, n) for n in (True, 1.0)]
        assert [launched(state) for state in later] == [launched(first)] * 2
        assert list(hits(states).values()) == [FIRST] * 3
        assert states.choices == {(1,): FIRST}
        del states.choices[1,]
        assert [launched(state) for state in states] == [None] * 3
        assert launched(missed(states, 1)) is None

    def test_what_is_no_config_is_refused(self, states: KeyStates) -> None:
        with pytest.raises(
            InvalidConfig, match=r"cache\[\(1,\)\] of base_fn is set to 64 \(int\); it"
        ):
            states.choices[1,] = 64
        assert states.choices == {}

    def test_a_missing_key_is_an_error_as_in_a_dict(self, states: KeyStates) -> None:
        states.of("key").set_fallback(FIRST)
        for remove in (lambda cache: cache.pop("key"), lambda cache: cache.__delitem__("key")):
            with pytest.raises(KeyError, match="key"):
                remove(states.choices)
        with pytest.raises(KeyError, match="empty"):
            states.choices.popitem()
        assert states.choices.pop("key", None) is None
        assert hits(states) == {"key": FIRST}

    def test_clear_forgets_fallbacks_and_rejections_too(self, states: KeyStates) -> None:
        states.of("a").set_fallback(FIRST)
        states.of("b").set_fallback(FIRST, Later())
        states.of("c").set_choice(FIRST)
        states.of("c").reject("odd", FIRST)
        states.choices[4,] = FIRST
        states.choices.clear()
        assert launched(missed(states, 4)) is None
        states.choices.clear()
        assert [launched(state) for state in states] == [None] * 4
        assert hits(states) == {}
        for state in states:
            state.set_choice(FIRST)
        assert len(hits(states)) == 4, "nothing is rejected any more"

    def test_assigned_choices_replace_all_others(self, states: KeyStates) -> None:
        states.of("a").set_choice(FIRST)
        states.of("b").set_fallback(FIRST)
        states.replace_choices({(3,): SECOND})
        assert launched(missed(states, 3)) == (SECOND, Reason.WRITTEN, True)
        assert states.choices == {(3,): SECOND}
        assert list(hits(states).values()) == [SECOND]
        states.replace_choices(states.choices)
        assert states.choices == {(3,): SECOND}

    @pytest.mark.parametrize(
        "copied",
        [copy.copy, copy.deepcopy, dict.copy, lambda cache: pickle.loads(pickle.dumps(cache))],
        ids=["copy", "deepcopy", "dict.copy", "pickle"],
    )
    def test_a_copy_is_a_plain_dict(self, states: KeyStates, copied: Any) -> None:
        states.of("a").set_choice(FIRST)
        found = copied(states.choices)
        assert type(found) is dict
        assert found == {"a": FIRST}

    def test_a_pickled_tuner_keeps_its_choices(self, states: KeyStates) -> None:
        """Though the lock of a key cannot be pickled."""
        missed(states, 1).set_choice(FIRST)
        missed(states, 2).set_fallback(SECOND)
        found = pickle.loads(pickle.dumps(states))
        assert found.choices == {(1,): FIRST}
        assert launched(missed(found, 1)) == (FIRST, Reason.WRITTEN, True)
        assert launched(missed(found, 2)) is None
        assert found.tuner is not states.tuner


def test_a_fork_gets_locks_that_no_thread_holds(states: KeyStates, state: KeyState) -> None:
    """Else the child's first miss of a key that was being tuned waits for ever."""
    state.set_fallback(FIRST)
    held, over = threading.Event(), threading.Event()

    def tune() -> None:
        with state.lock:
            held.set()
            over.wait(SOON_S)

    thread = threading.Thread(target=tune)
    thread.start()
    assert held.wait(SOON_S)
    pid = os.fork()
    if pid == 0:
        free = state.lock.acquire(blocking=False)
        state.set_choice(SECOND)
        os._exit(0 if free and hits(states) == {"key": SECOND} else 1)
    _, status = os.waitpid(pid, 0)
    over.set()
    thread.join(SOON_S)
    assert status == 0

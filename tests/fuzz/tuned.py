"""Programs that stock Triton and safetune really tune, compared event by event.

A case is a program and three sessions. Each session is a process: its tuner is new, its text may be
edited and its configs listed otherwise; the store is the same for all. The second session runs in
another process, where strings have other hashes. Stock Triton tunes in each session what it
meets; safetune must launch the same config, read the same in `cache`, and raise the same class of
error, whether it tunes or finds what is stored.

Documented differences (docs/migrating.md), which no event draws: values of a key that are equal and
of two types, a call that passes what the configs set, options of a call, which count in the key,
and `nargs`. A tensor counts in an argument by its dtype. Two functions of one text are one value,
and two times within half a percent are a tie. Of a name that nothing reads (`D`), safetune's
`cache` has one entry for all values, and finds it by each of them. A function that a call passes
counts in safetune's key by its text, also outside of `key`. So some calls have one key on one side
and two on the other, which are tuned at different times: where the configs or a method are replaced
in between, `cache` is cleared.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import pickle
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner

from safetune import safetune
from tests.fuzz import programs
from tests.fuzz.programs import ARGUMENTS, Event, Program

MODULE = "safetune_fuzz_program"

#: Ends a session.
NEXT = Event("next session")

#: By name: changes the arguments of a call to what no config can be launched with.
WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "missing": lambda call: call.pop("n"),
    "missing constant": lambda call: call.pop("S"),
    "missing key": lambda call: call.pop("K"),
    "None for a constant": lambda call: call.update(S=None),
    "text for a constant": lambda call: call.update(S="wide"),
    "None for a tensor": lambda call: call.update(x=None),
    "list for a tensor": lambda call: call.update(x=[1, 2]),
    "tensor for a number": lambda call: call.update(n=call["out"]),
    "bad shape": lambda call: call.update(S=-1),
}


def _write(side: TunedSide, number: int) -> Any:
    key = side.key(number)
    side.tuner.cache[key] = side.config(number)


def _assign(side: TunedSide, number: int) -> None:
    side.tuner.cache = {side.key(number): side.config(number // 7)}


def _through_json(side: TunedSide, number: int) -> None:
    if side.program.is_plain:
        rows = [[list(key), each.kwargs] for key, each in side.tuner.cache.items()]
        table = {tuple(key): triton.Config(kwargs) for key, kwargs in json.loads(json.dumps(rows))}
        side.tuner.cache.clear()
        side.tuner.cache.update(table)


#: By name: what reads or writes `cache`; what it returns is compared.
CACHE: dict[str, Callable[[TunedSide, int], Any]] = {
    "items": lambda side, number: side.items(),
    "key[:n]": lambda side, number: {key[:1] for key in side.items()},
    "in": lambda side, number: side.key(number) in side.tuner.cache,
    "get": lambda side, number: side.described(side.tuner.cache.get(side.key(number))),
    "item": lambda side, number: side.described(side.tuner.cache[side.key(number)]),
    "write": _write,
    "update": lambda side, number: side.tuner.cache.update({side.key(number): side.config(number)}),
    "assign": _assign,
    "pop": lambda side, number: side.described(side.tuner.cache.pop(side.key(number), None)),
    "clear": lambda side, number: side.tuner.cache.clear(),
    "through JSON": _through_json,
}

#: Kinds of `CACHE` that write, which programs with a name that nothing reads leave out.
WRITES = frozenset({"write", "update", "assign", "pop", "through JSON"})


def _replace(side: TunedSide, number: int) -> None:
    configs = side.tuner.configs
    configs.append(configs.pop(number % len(configs)))


def _append(side: TunedSide, number: int) -> None:
    config = side.config(number, new=True)
    if config not in side.tuner.configs:
        side.tuner.configs.append(config)


def _remove(side: TunedSide, number: int) -> None:
    if len(side.tuner.configs) > 2:
        side.removed.append(side.tuner.configs.pop(number % len(side.tuner.configs)))


def _put_back(side: TunedSide, number: int) -> None:
    if side.removed:
        side.tuner.configs.insert(0, side.removed.pop())


def _all_replaced(side: TunedSide, number: int) -> None:
    configs = list(side.tuner.configs)
    side.tuner.configs.clear()
    side.tuner.configs.extend(reversed(configs))


# A change of the key clears `cache`, as its entries have the old key's names.


def _key_appended(side: TunedSide, number: int) -> None:
    name = "NM"[number % 2]
    if name not in side.keys:
        side.keys.append(name)
        side.tuner.keys.append(name)
        side.tuner.cache.clear()


def _key_removed(side: TunedSide, number: int) -> None:
    free = [name for name in side.keys if name not in (*side.program.costly, "D")]
    if free:
        side.keys.remove(free[0])
        side.tuner.keys.remove(free[0])
        side.tuner.cache.clear()


def _keys_turned(side: TunedSide, number: int) -> None:
    side.keys.reverse()
    side.tuner.keys = list(side.keys)
    side.tuner.cache.clear()


#: By name: what changes a list.
LISTS: dict[str, Callable[[TunedSide, int], None]] = {
    "config moved": _replace,
    "config appended": _append,
    "config removed": _remove,
    "config put back": _put_back,
    "configs turned": _all_replaced,
    "key appended": _key_appended,
    "key removed": _key_removed,
    "keys turned": _keys_turned,
}

_STOCK = {name: vars(Autotuner)[name] for name in ("run", "_bench", "prune_configs")}


def _pinned_run(self: Any, *args: Any, **kwargs: Any) -> Any:
    saved = self.configs
    self.configs = [min(saved, key=lambda config: config.kwargs["BLOCK"])]
    try:
        return _STOCK["run"](self, *args, **kwargs)
    finally:
        self.configs = saved


def _by_rule(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
    return [float(config.kwargs["BLOCK"] % 48)] * 3


def _last(self: Any, kwargs: Any) -> list[Any]:
    return self.configs[-1:]


#: By name: a method of Triton's tuner class, and what a framework has in its place.
PATCHES = {"run": _pinned_run, "_bench": _by_rule, "prune_configs": _last}

FEATURES = frozenset(
    {*programs.VALUES, *programs.TENSORS, *programs.PRUNERS, "facts", "worker", "edits", "lists"}
    | {*WRONG, *CACHE, *LISTS, *PATCHES}
) - {"", "integer", "plain"}


def draw(rng: random.Random, program: Program) -> list[Event]:
    """Return the events of three sessions."""
    found: list[Event] = []
    for _ in range(3):
        if rng.random() < 0.1:  # before decoration
            found.append(Event(rng.choice(list(PATCHES))))
        for _ in range(rng.randint(4, 12)):
            values = tuple((name, rng.randrange(3)) for name in "NKMDx")
            call = Event("launch", rng.randrange(1 << 10), values)
            if rng.random() < 0.12:
                found += [Event(rng.choice(list(WRONG)), call.number, values)]
            found += [call] * rng.choice((1, 2, 3))
            if rng.random() < 0.5:
                table = rng.choices((CACHE, LISTS, PATCHES), (6, 4, 1))[0]
                found.append(Event(rng.choice(list(table)), rng.randrange(1 << 10)))
        found += [Event("items"), NEXT]
    return found


class TunedSide:
    """A tuner of one side, in one session.

    Attributes:
        keys: the names in its key now.
        calls: the values of the launches so far.
        removed: configs that were removed from the list.
    """

    def __init__(self, program: Program, session: int, path: Path, code: Any, ours: bool) -> None:
        self.program, self.ours = program, ours
        self.keys, self.calls, self.removed = list(program.key), [dict.fromkeys("NKMDx", 0)], []
        self.module = ModuleType(MODULE)
        vars(self.module)["__file__"] = str(path)
        sys.modules[MODULE] = self.module
        exec(code, vars(self.module))
        self._made: dict[Any, Any] = {}
        listed = [self.config(number) for number in program.lists[session]]
        options: dict[str, Any] = {"configs": listed, "key": list(program.key)}
        options |= {"do_bench": self.module.bench, "prune_configs_by": self.module.PRUNER}
        kernel = triton.heuristics({"E": self.module.fact_of})(self.module.body)
        if ours:
            self.tuner = safetune(**options, isolation=program.isolation)(kernel)
        else:
            self.tuner = triton.autotune(**options)(kernel)

    def config(self, number: int, new: bool = False) -> triton.Config:
        """Return a config of the program's, by number."""
        block, c = self.program.configs[number % len(self.program.configs)]
        return triton.Config({"BLOCK": block, "C": self.value("C", c)})

    def value(self, name: str, number: int) -> Any:
        """Return a value of this side's own; the same object each time."""
        if name in "ND":
            return number + 1
        if (name, number) not in self._made:
            self._made[name, number] = self.module.MAKERS[name](number)
        return self._made[name, number]

    def arguments(self, values: dict[str, int]) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        dtype = (torch.float32, torch.float16, torch.int32)[values["x"]]
        x = self.module.tensor_of((torch.arange(64) % 7).to(dtype))
        found = {"x": x, "out": torch.zeros(64, dtype=dtype), "n": 64, "S": 16}
        found |= {name: self.value(name, values[name]) for name in "NKMD"}
        return {name: found[name] for name in ARGUMENTS}

    def key(self, number: int) -> Any:
        """Return Triton's key of one of the calls so far."""
        call = self.arguments(self.calls[number % len(self.calls)])
        dtypes = [str(call[name].dtype) for name in ("x", "out")]
        dtypes += [str(value.dtype) for value in call.values() if hasattr(value, "dtype")][2:]
        return (*(call[name] for name in self.keys), *dtypes)

    def described(self, config: Any) -> Any:
        """Return a config as something that both sides have."""
        return config and tuple(self._plain(name, v) for name, v in sorted(config.kwargs.items()))

    def _plain(self, name: str, value: Any) -> Any:
        return self.module.PROBES[name](value) if name in self.module.PROBES else value

    def items(self) -> dict[Any, Any]:
        """Return what `cache` has, described."""
        found = {}
        for key, config in self.tuner.cache.items():
            names = (*self.keys, "", "")
            is_usual = len(names) == len(key)  # that of a wrong call may not be
            plain = tuple(map(self._plain, names, key)) if is_usual else len(key)
            found[plain] = self.described(config)
        return found

    def replaced(self) -> None:
        """Forget what was tuned before a change, where that is not the same calls on both sides."""
        is_one_there = "M" not in self.keys and self.program.kinds["M"] in programs.WITH_CODE
        if is_one_there or shares_entries(self.program):
            self.tuner.cache.clear()

    def apply(self, event: Event) -> Any:
        """Do what an event says; return all that was observed."""
        try:
            if event.what in CACHE:
                return CACHE[event.what](self, event.number)
            if event.what in LISTS:
                LISTS[event.what](self, event.number)
                return self.replaced()
            return self._launch(event)
        except Exception as error:
            return "error", type(error), error

    def _launch(self, event: Event) -> Any:
        call = self.arguments(dict(event.values))
        out = call["out"]
        if event.what in WRONG:
            WRONG[event.what](call)
        else:
            self.calls.append(dict(event.values))
        args = []
        for name in ARGUMENTS[: event.number % len(ARGUMENTS)]:
            if name not in call:
                break
            args.append(call.pop(name))
        self.module.SEEN.clear()
        grid: Any = (1,) if event.number % 3 == 0 else lambda meta: (1 + 0 * meta["BLOCK"],)
        self.tuner[grid](*args, **call)
        return dict(self.module.SEEN), out.tolist(), self.described(self.tuner.best_config)


def shares_entries(program: Program) -> bool:
    """Return whether safetune may have one entry where stock Triton has several: one for all values
    of a name that nothing reads, or for two functions of one text. It finds it by keys that were
    not called.
    """
    return "D" in program.key or "equal lambda" in (program.kinds["K"], program.kinds["M"])


def different(event: Event, stock: Any, ours: Any, program: Program) -> bool:
    """Return whether what was observed differs."""
    errors = [
        each[:2] if isinstance(each, tuple) and each[:1] == ("error",) else None
        for each in (stock, ours)
    ]
    is_missing = stock is None or stock is False or errors[0] == ("error", KeyError)
    if event.what in ("get", "in", "item") and is_missing and shares_entries(program):
        return errors[1] not in (None, ("error", KeyError))
    if any(errors):
        return errors[0] != errors[1]
    if "D" in program.key and event.what == "items":
        return not ours.items() <= stock.items()
    return stock != ours


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Have Triton's interpreter patch its language once, instead of at each launch: that takes most
    of a launch.
    """
    patch = interpreter._patch_lang
    scope = patch(SimpleNamespace(__globals__={"tl": triton.language}))
    interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)
    try:
        yield
    finally:
        interpreter._patch_lang = patch
        scope.restore()


@contextlib.contextmanager
def patched(methods: set[str]) -> Iterator[None]:
    """Have Triton's tuner class as it is, whatever is put into `methods` until the end."""
    try:
        yield
    finally:
        for name in methods:
            setattr(Autotuner, name, _STOCK[name])


def run_session(
    program: Program, events: Sequence[Event], session: int, nonce: int
) -> tuple[int, str]:
    """Run one session on both sides; return the number of launches and the first difference."""
    launches, sides, replaced = 0, [], set[str]()
    with tempfile.TemporaryDirectory() as folder, patched(replaced), interpreting():
        path = Path(folder, "program.py")
        text = programs.text_of(program, session, nonce)
        path.write_text(text, encoding="utf-8")
        code = compile(text, str(path), "exec")
        for event in events:
            if event.what in PATCHES:
                replaced ^= {event.what}
                to = PATCHES if event.what in replaced else _STOCK
                setattr(Autotuner, event.what, to[event.what])
                for side in sides:
                    side.replaced()
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                sides = sides or [
                    TunedSide(program, session, path, code, ours) for ours in (False, True)
                ]
                observed = [side.apply(event) for side in sides]
            launches += event.what == "launch" or event.what in WRONG
            if different(event, *observed, program):
                texts = "\n".join(
                    f"    {side:8} {each}"
                    for side, each in zip(("stock", "safetune"), observed, strict=True)
                )
                return launches, f"session {session}: {event}\n{texts}"
        linecache.cache.pop(str(path), None)
    return launches, ""


class OtherProcess:
    """A process with other hashes of strings, which runs second sessions until this one ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run_session(self, *session: Any) -> Any:
        """Run a session there; return what `run_session` returns."""
        if self._process is None:
            environment = {**os.environ, "PYTHONHASHSEED": "random"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.tuned"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
        to, back = self._process.stdin, self._process.stdout
        assert to is not None
        assert back is not None
        pickle.dump(session, to)
        to.flush()
        return pickle.load(back)

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


def serve() -> None:
    """Run the sessions that come in by standard input."""
    back = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a kernel prints
    while sys.stdin.buffer.peek(1):
        session = pickle.load(sys.stdin.buffer)
        pickle.dump(run_session(*session), back)
        back.flush()


other = OtherProcess()


def drawn(
    seed: int, off: frozenset[str], kept: Sequence[int] | None
) -> tuple[Program, list[Event]]:
    """Return the program and the events of a case; all of it follows from the seed."""
    rng = random.Random(seed)
    # Several in a row, as a child that has nothing to do for two seconds leaves.
    program = programs.draw(rng, "worker" if seed // 8 % 4 == 0 else "inline")
    events = draw(rng, program)
    if kept is not None:
        events = [events[number] for number in kept]
    # What is written for one of two functions of one text holds for the other, too.
    if shares_entries(program):
        off |= WRITES
    return programs.without(program, off), [each for each in events if each.what not in off]


def run(program: Program, events: Sequence[Event]) -> tuple[int, str]:
    """Run a case's sessions; return the number of launches and the first difference."""
    nonce, launches, start = random.SystemRandom().randrange(1 << 60), 0, 0
    for session in range(3):
        end = events.index(NEXT, start) if NEXT in events[start:] else len(events)
        place = other.run_session if session == 1 else run_session
        counted, found = place(program, events[start:end], session, nonce)
        launches, start = launches + counted, end + 1
        if found or start >= len(events):
            return launches, found
    return launches, ""


if __name__ == "__main__":
    serve()

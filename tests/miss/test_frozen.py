"""`SAFETUNE_MODE=frozen`: what is launched, in which order, and that nothing else happens."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import safetune
from safetune.errors import StoreError
from safetune.outcome import Outcome, Timing, Verdict
from safetune.settings import Settings
from safetune.store.local.store import Store
from safetune.store.lookup import open_lookup
from safetune.store.packs import exchange
from safetune.store.packs.packs import read_pack
from safetune.store.records import TrialRecord
from safetune.store.shared.files import Directory
from safetune.store.shared.opening import open_shared
from safetune.store.shared.protocol import Name, namespace
from tests.store.shared.conftest import until

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

OTHER = {"triton": "3.0.0", "backend": "b", "target": "t", "environment": {}}
BLOCKS = (16, 32, 64)


@pytest.fixture(autouse=True)
def _frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFETUNE_MODE", "frozen")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "safetune")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "safetune"]


class TestTheOrder:
    def test_without_any_choice_the_first_config_is_launched(
        self, copies: Any, lines: Any, cache_dir: Path
    ) -> None:
        made = copies(blocks=BLOCKS)
        assert [made(), made(), made(101)] == [16, 16, 16]
        assert lines() == [
            f"copy_kernel has no choice for n={n} (float32) and runs with BLOCK=16 num_warps=4 "
            "num_stages=3: the first config not known to fail"
            for n in (100, 101)
        ]
        assert not cache_dir.exists()

    def test_the_choice_of_the_key_comes_first(self, copies: Any, packed: Any, lines: Any) -> None:
        made = copies(blocks=BLOCKS)
        packed(made, 32)
        packed(made, 64, toolchain=OTHER, generation=9)
        assert made() == 32
        assert lines() == [
            "copy_kernel has a choice for n=100 (float32): BLOCK=32 num_warps=4 num_stages=3"
        ]

    def test_second_is_the_choice_from_another_list_of_configs(
        self, copies: Any, packed: Any, lines: Any
    ) -> None:
        made = copies(blocks=BLOCKS)
        path = packed(copies(blocks=(32, 64, 128)), 32)
        packed(made, 64, toolchain=OTHER)
        assert made() == 32
        assert lines()[0].endswith(f": its choice from another list of configs (from {path})")

    def test_third_is_a_choice_of_another_triton(
        self, copies: Any, packed: Any, lines: Any
    ) -> None:
        made = copies(blocks=BLOCKS)
        path = packed(made, 64, toolchain=OTHER)
        packed(made, 32, n=101)
        assert made() == 64
        assert lines()[0].endswith(
            f": its choice (made by another toolchain, with Triton 3.0.0, from {path})"
        )

    def test_fourth_is_the_choice_of_the_nearest_key(
        self, copies: Any, packed: Any, lines: Any
    ) -> None:
        made = copies(blocks=BLOCKS)
        packed(made, 64, toolchain=OTHER, n=99)
        packed(made, 16, n=5000)
        path = packed(made, 32, n=300)
        assert made() == 32
        assert lines()[0].endswith(f": the choice for n=300 (float32) (from {path})")

    def test_fifth_is_the_choice_of_the_nearest_key_of_another_triton(
        self, copies: Any, packed: Any, lines: Any
    ) -> None:
        made = copies(blocks=BLOCKS)
        packed(made, 64, toolchain=OTHER, n=99)
        assert made() == 64
        assert "the choice for n=99 (float32) (made by another toolchain, with" in lines()[0]

    def test_a_config_that_is_not_declared_is_never_launched(
        self, copies: Any, packed: Any
    ) -> None:
        packed(copies(blocks=(128, 256)), 256)
        assert copies(blocks=BLOCKS)() == 16

    def test_a_choice_in_the_store_comes_before_one_in_a_pack(
        self, copies: Any, packed: Any, cache_dir: Path, lines: Any
    ) -> None:
        made = copies(blocks=BLOCKS)
        path = packed(made, 32)
        store = Store.open(cache_dir)
        exchange.import_into(store, read_pack(path))
        store.close()
        path.unlink()
        packed(made, 64)
        assert made() == 32

    def test_an_inline_kernel_is_not_tuned(self, copies: Any, lines: Any) -> None:
        assert copies(blocks=BLOCKS, isolation="inline")() == 16
        assert len(lines()) == 1

    def test_malformed_related_choices_raise_nothing(
        self, copies: Any, packed: Any, cache_dir: Path
    ) -> None:
        """Rows that say of calls what no call is."""
        made = copies(blocks=BLOCKS)
        entry = read_pack(packed(made, 32))[0]
        store = Store.open(cache_dir)
        calls: list[Any] = [{}, {"values": 5}, {"values": [5]}, {"values": [["n"]]}, {"x": [[]]}]
        whole = {"dtypes": entry.key.call["dtypes"], "options": entry.key.call["options"]}
        calls += [{**call, **whole} for call in calls]
        for number, call in enumerate(calls):
            store.put_key(replace(entry.key, digest=f"k{number}", call=call))
            store.put_choice(replace(entry.choice, key=f"k{number}"))
        store.close()
        for path in packed.directory.iterdir():
            path.unlink()
        assert made() == 16


SCRIPT = """
import json, os, sys
import torch, triton, triton.language as tl
store, packs = os.environ["SAFETUNE_CACHE_DIR"], os.environ.get("SAFETUNE_PACKS", "/nonexistent")
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system")
WRITES = ("os.mkdir", "os.rename", "os.remove", "os.chmod", "os.truncate", "os.utime", "os.link")
seen = []

def hook(event, args):
    ours = str(args[0] if args else "").startswith((store, packs))
    writing = event == "open" and len(args) > 2 and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)
    if event in STARTS or (ours and (event in WRITES or writing)):
        seen.append(f"{event} {args}")

sys.addaudithook(hook)
from safetune import safetune

@safetune(configs=[triton.Config({"BLOCK": b}) for b in (16, 32)], key=["n"])
@triton.jit
def fill_kernel(x, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, offset, mask=offset < n)

for n in (100, 200):
    fill_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](torch.zeros(n), n)
    if os.environ.get("SAFETUNE_MODE") != "frozen":
        break
print(json.dumps([seen, fill_kernel.best_config.kwargs["BLOCK"]]))
"""


def state(directory: Path) -> dict[str, Any]:
    if not directory.exists():
        return {}
    stats = {path: path.stat() for path in (directory, *directory.iterdir())}
    return {str(path): (found.st_mtime_ns, found.st_size) for path, found in stats.items()}


def test_nothing_is_started_or_written(
    fresh_process: FreshProcess, tmp_path: Path, cache_dir: Path
) -> None:
    """Without a store, with one, and with one whose log is still there."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(mode: str | None = "frozen") -> Any:
        done = fresh_process(script, env={"SAFETUNE_MODE": mode}, warm=True)
        return json.loads(done.stdout)

    assert run() == [[], 16]
    assert state(cache_dir) == {}

    seen, chosen = run(mode=None)
    assert seen, "tuning starts processes and writes"
    for hot in (False, True):
        store = Store.open(cache_dir)
        other = 16 + 32 - chosen
        if hot:  # the other config is the choice now, and only the log says so
            entry = store.choices()[0]
            trials = store.trials_of("fill_kernel")[0][1]
            (trial,) = (t for t in trials if t.config["BLOCK"] == other)
            store.put_choice(
                replace(
                    entry.choice,
                    generation=2,
                    config=trial.config,
                    config_digest=trial.config_digest,
                )
            )
        else:
            store.close()
        before = state(cache_dir)
        assert len(before) == (6 if hot else 4)  # the folder, the database, two lock files; a log
        assert run() == [[], other if hot else chosen]
        after = state(cache_dir)
        assert set(after) == set(before)
        unchanged = [path for path in before if not path.endswith("-shm")]
        assert [after[path] for path in unchanged] == [before[path] for path in unchanged]
        store.close()


@pytest.fixture
def shared_folder() -> Any:
    """A folder that every user can reach."""
    with tempfile.TemporaryDirectory(prefix="safetune-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


READ_AS_NOBODY = """
import os, sys, urllib.parse
from pathlib import Path
from safetune.store.local.store import Store
import safetune.store.packs.exchange, sqlite_utils
if os.geteuid() == 0:
    os.setgroups([])
    os.setegid(65534)
    os.seteuid(65534)
folder = Path(sys.argv[1])
try:
    (folder / "probe").touch()
except OSError:
    pass
else:
    sys.exit("this user may write here")
for path in folder.glob("*.db"):
    print(path.name, sorted(e.choice.measured for e in Store.open_read_only(path).choices()))
"""


def test_a_user_without_write_permission_reads_the_store(
    copies: Any, packed: Any, shared_folder: Path, fresh_process: FreshProcess
) -> None:
    """A database at rest, and one in use."""
    entries = read_pack(packed(copies(blocks=BLOCKS), 32, measured=3))
    stores = []
    for name in ("rest", "use"):
        store = Store.open(shared_folder / name)
        exchange.import_into(store, entries)
        stores.append(store)
    stores[0].close()
    for name in ("rest", "use"):
        for file in (shared_folder / name).iterdir():
            target = shared_folder / file.name.replace("safetune.db", f"{name}.db")
            target.write_bytes(file.read_bytes())
            target.chmod(0o444)
    shared_folder.chmod(0o555)

    done = fresh_process(READ_AS_NOBODY, shared_folder)

    shared_folder.chmod(0o755)
    assert sorted(done.stdout.splitlines()) == ["rest.db [3]", "use.db [3]"]
    for store in stores:
        store.close()


def test_a_store_that_cannot_be_read_costs_one_warning(
    copies: Any, cache_dir: Path, lines: Any
) -> None:
    cache_dir.mkdir()
    (cache_dir / "safetune.db").write_bytes(b"garbage" * 1000)
    made = copies(blocks=BLOCKS)
    with pytest.warns(UserWarning, match=f"cannot read the store {cache_dir}/safetune.db: file is"):
        assert made() == 16
    made(101)
    assert (cache_dir / "safetune.db").read_bytes() == b"garbage" * 1000
    assert len(list(cache_dir.iterdir())) == 1


def test_nothing_is_written_through_a_read_only_store(cache_dir: Path) -> None:
    Store.open(cache_dir).close()
    store = Store.open_read_only(cache_dir / "safetune.db")
    with pytest.raises(StoreError, match="is open read-only"):
        store.clear("add")


def test_a_shared_store_is_only_read(
    copies: Any, packed: Any, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has is launched; what this node measured is not given to it, nor written here."""
    made, folder = copies(blocks=BLOCKS), tmp_path / "shared"
    (theirs,), (_, ours) = read_pack(packed(made, 32)), read_pack(packed(made, 64, n=101))
    monkeypatch.delenv("SAFETUNE_PACKS")
    monkeypatch.setenv("SAFETUNE_SHARED", f"file://{folder}")
    space = namespace(theirs.key.device, theirs.key.toolchain)
    open_shared(f"file://{folder}").publish(space, [theirs])
    store = Store.open(cache_dir)
    store.put_key(ours.key)
    store.put_trial(
        TrialRecord(
            key=ours.key.digest,
            config_digest=ours.choice.config_digest,
            config=ours.choice.config,
            generation=1,
            outcome=Outcome(Verdict.OK, Timing(1.0, 1.0, 1.0, 9, "final")),
            created=1.0,
        )
    )
    store.put_choice(ours.choice)
    store.close()
    before = state(cache_dir), sorted(folder.rglob("*.json"))

    assert [made(), made(101)] == [32, 64]
    safetune.sync()

    assert (state(cache_dir), sorted(folder.rglob("*.json"))) == before
    assert len(before[1]) == 1


def test_a_fallback_before_the_first_pull_is_looked_up_again_after_it(
    copies: Any, packed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared store has the choice, and its first answer comes too late for the first launch."""
    made, folder, answers = copies(blocks=BLOCKS), tmp_path / "shared", threading.Event()
    (theirs,) = read_pack(packed(made, 32))
    monkeypatch.delenv("SAFETUNE_PACKS")
    monkeypatch.setenv("SAFETUNE_SHARED", f"file://{folder}")
    space = namespace(theirs.key.device, theirs.key.toolchain)
    open_shared(f"file://{folder}").publish(space, [theirs])

    class Late(Directory):
        def names(self, namespace: str) -> set[Name]:
            answers.wait()
            return super().names(namespace)

    monkeypatch.setattr("safetune.store.shared.files.Directory", Late)
    monkeypatch.setattr("safetune.store.shared.puller.FIRST_S", 0.1)
    assert [made(), made()] == [16, 16]
    answers.set()
    until(lambda: made() == 32)


def test_offline_tuning_writes_to_the_store(copies: Any, cache_dir: Path) -> None:
    """`safetune tune` writes to the store whatever the mode is."""
    from safetune.offline import tasks

    store = tasks.open_tuning_store()
    assert store.path == cache_dir / "safetune.db"
    assert store.path.exists()
    assert open_lookup(Settings.current()).store is not store


def test_a_forked_process_reads_the_store(copies: Any, packed: Any, cache_dir: Path) -> None:
    made = copies(blocks=BLOCKS)
    store = Store.open(cache_dir)
    exchange.import_into(store, read_pack(packed(made, 32)))
    store.close()
    lookup = open_lookup(Settings.current())
    pid = os.fork()
    if pid == 0:
        os._exit(len(lookup.store.choices()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1

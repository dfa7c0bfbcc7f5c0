"""`safetune.sync()`: ranks that would launch different configs launch the same one afterwards."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safetune import sync
from safetune.config import config_digest, config_record
from safetune.errors import SafetuneWarning
from safetune.keys import encoding
from safetune.miss.sync import Launched
from safetune.settings import Settings
from safetune.store.lookup import open_lookup
from safetune.store.records import KeyRecord, StoredChoice, space_of
from safetune.store.shared.files import Directory

from . import conftest as make
from .conftest import Children

RANKS = 4


def printed(output: str) -> Any:
    """What a program printed as JSON, after what gloo of torch 2.8 says there."""
    begin = re.search(r'\[["{]', output)
    assert begin is not None, output
    return json.JSONDecoder().raw_decode(output, begin.start())[0]


@pytest.fixture
def ranks(children: Children, tmp_path: Path) -> list[dict[str, Any]]:
    """What four ranks on gloo did, each with a store of its own."""
    script = Path(__file__).with_name("ranks.py")
    output = children.run(script, tmp_path, RANKS, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    found: list[dict[str, Any]] = printed(output)
    return found


def test_four_ranks_agree(ranks: list[dict[str, Any]]) -> None:
    def launched(when: str, n: int) -> list[int]:
        return [rank[when][str(n)] for rank in ranks]

    for n in (100, 200, 300):
        assert len({*launched("before", n)}) > 1
        assert launched("after", n) == launched("before", n)[:1] * RANKS, "rank 0's"
    assert launched("before", 100) == [16, 32, 64, 128]
    one_fallback, all_fallbacks = zip(*(rank["untuned"] for rank in ranks), strict=True)
    assert one_fallback == (16, 32, 64, 128)
    assert all_fallbacks == (16, 32, 64, 128), "captured; the nearest key differs"
    assert [rank["agreed"] for rank in ranks] == [[16, 16]] * RANKS, "not stored: rank 0's"
    own_fastest = [[16, 128, 16, 16], [32, 64, 16, 16], [64, 32, 16, 16], [128, 16, 16, 16]]
    assert [rank["inline"] for rank in ranks] == own_fastest, "both tuners of the kernel agree"
    differing = {rank["differing"] for rank in ranks}
    assert len(differing) == 1, "all ranks are told the same"
    assert differing.pop() in (7, 8), (
        "100 to 300, 700, two captured, inline; one may be timed apart"
    )
    for number, rank in enumerate(ranks):
        own = str(400 + number)
        assert rank["after"][own] == rank["before"][own], "no other rank has this key"
        assert rank["stored"] == 16, "the next run begins with what was agreed on"
        nodes = [text for text in rank["said"] if "SAFETUNE_SHARED is not set" in text]
        assert nodes == [
            f"safetune [rank {number}]: this job has 4 processes, 1 of them on this node, but "
            "SAFETUNE_SHARED is not set: each node tunes for itself, and they may launch different "
            "configs until safetune.sync()"
        ]
    for rank in ranks:
        _, agreed, later, at_last = rank["late"]
        assert agreed == later == ranks[0]["late"][0], "each has a choice by now, and holds it back"
        assert at_last == ranks[0]["tuned"]


class TestSharedStore:
    """One process, without torch.distributed: another node is a writer of the directory."""

    @pytest.fixture
    def publish(
        self, program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[[int, int], None]:
        (tmp_path / "shared").mkdir()
        monkeypatch.setenv("SAFETUNE_SHARED", f"file://{tmp_path}/shared")

        def write(block: int, generation: int) -> None:
            wanted = program.request(100)
            config = next(c for c in wanted.configs if c.kwargs["BLOCK"] == block)
            choice = make.choice(
                key=wanted.key.digest,
                generation=generation,
                config_digest=config_digest(config),
                config=config_record(config),
                declared=wanted.declared,
            )
            record = StoredChoice(KeyRecord.of(wanted.key), choice)
            Directory(tmp_path / "shared").publish(space_of(wanted.key), [record])

        return write

    def test_a_new_generation_is_adopted_at_sync_and_not_before(
        self, program: Any, publish: Callable[[int, int], None]
    ) -> None:
        publish(64, 1)
        assert program.launch(100) == 64
        publish(32, 2)
        assert program.launch(100) == 64
        sync()
        assert program.launch(100) == 32

    def test_a_frozen_process_takes_what_rank_0_launches_and_does_not_try_to_store_it(
        self,
        program: Any,
        publish: Callable[[int, int], None],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        publish(64, 1)
        assert program.launch(100) == 64
        monkeypatch.setenv("SAFETUNE_MODE", "frozen")
        other = config_digest(
            next(c for c in program.copy_kernel.configs if c.kwargs["BLOCK"] == 32)
        )

        def of_rank_0(own: dict[str, Launched], *_: object) -> tuple[dict[str, Launched], int]:
            return {key: Launched(other, launched.choice) for key, launched in own.items()}, 0

        monkeypatch.setattr("safetune.miss.sync._of_rank_0", of_rank_0)
        sync()
        assert program.launch(100) == 32
        assert not any("agreed choices" in text for text in caplog.messages)

    def test_a_record_can_select_nothing_that_is_not_declared(
        self, program: Any, publish: Callable[[int, int], None], tmp_path: Path
    ) -> None:
        """A record with a config that the kernel does not have."""
        publish(64, 1)
        (path,) = (tmp_path / "shared").rglob("*.json")
        content = json.loads(path.read_text())
        content["tunings"][0]["choices"][0]["config"] = {"BLOCK": 4096}
        del content["checksum"]
        path.write_text(encoding.dumps({**content, "checksum": encoding.digest(content)}))
        with warnings.catch_warnings():
            warnings.simplefilter("error", SafetuneWarning)
            assert program.launch(100) in program.BLOCKS  # it is tuned
        assert len(open_lookup(Settings.current()).store.trials_of("copy_kernel")[0][1]) == 4

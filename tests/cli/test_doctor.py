"""`safetune doctor`: what it finds on good and bad machines, and how it looks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import triton

from safetune.cli.doctor import machine
from safetune.cli.output import version_of
from tests.cli.conftest import ROOT
from tests.libcuda import stub

if TYPE_CHECKING:
    from tests.conftest import FreshProcess


def found(safetune: Any, code: int = 0) -> dict[str, dict[str, str]]:
    """The checks by their names, as JSON says them; the last of those of one name."""
    result = safetune("doctor", "--quick", "--json")
    data = json.loads(result.stdout)
    states = {check["state"] for check in data["checks"]}
    assert result.exit_code == code
    assert data["ok"] == ("fail" not in states) == (code == 0)
    assert all(check["fix"] for check in data["checks"] if check["state"] != "ok")
    return {check["name"]: check for check in data["checks"]}


def test_a_machine_without_a_gpu_is_fit_for_the_interpreter(
    safetune: Any, tuned_add: Any, cache_dir: Path
) -> None:
    checks = found(safetune)

    assert {"safetune", "torch", "triton", "driver", "CPUs", "memory", "open files"} < set(checks)
    assert checks["database"]["found"].endswith("does not exist yet, and can be created")
    assert not cache_dir.exists()
    shutil.copytree(tuned_add[0], cache_dir)
    checks = found(safetune)
    assert "3 keys, 6 trials, 3 choices, 0 recorded" in checks["database"]["found"]
    assert checks["permissions"]["state"] == "ok"


def test_isolation_is_tried_for_real_in_a_store_of_its_own(safetune: Any, cache_dir: Path) -> None:
    result = safetune("doctor")

    (line,) = [line for line in result.stdout.splitlines() if " isolation: " in line]
    assert line.startswith("ok ")
    assert "FAULT=0 ok" in line
    assert "FAULT=1 died(SIGSEGV)" in line
    assert not cache_dir.exists()


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "words"),
    [
        (2, "", "Warning: one\nError: device 0 is in compute mode PROHIBITED\n", "device 0 is in"),
        (1, "", "", "the command ended with 1"),
        (0, '{"trials": [{"config": "FAULT=1 a=1", "label": "ok"}]}', "", "FAULT=1 ok"),
    ],
)
def test_isolation_that_fails(code: int, stdout: str, stderr: str, words: str) -> None:
    check = machine.judged(code, stdout, stderr)

    assert check.state == "fail"
    assert check.found.startswith(words)


def test_a_module_of_a_package_of_another_name_has_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Triton is, where a build of torch brings it; the commands ended with a traceback."""
    (tmp_path / "no_package_has_this_name.py").write_text("__version__ = '3.6.0'")
    monkeypatch.syspath_prepend(tmp_path)
    assert version_of("no_package_has_this_name") == "3.6.0"
    assert version_of("triton") == triton.__version__


@pytest.mark.full
def test_isolation_is_tried_with_no_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe, seen = tmp_path / "probe.py", tmp_path / "seen"
    names = 'sorted(name for name in os.environ if name.startswith("SAFETUNE_"))'
    probe.write_text(f"import os, pathlib\npathlib.Path({str(seen)!r}).write_text(str({names}))\n")
    monkeypatch.setenv("SAFETUNE_WAIT", "1")

    (check,) = machine.isolation(probe)

    assert check.state == "fail", "there is no kernel"
    assert seen.read_text() == "['SAFETUNE_CACHE_DIR']"


class TestGpu:
    """A driver whose two devices are memory of the host, beside a torch without CUDA."""

    def checks(self, fresh_process: FreshProcess, **env: str) -> dict[str, dict[str, str]]:
        path = os.pathsep.join([str(stub.folder()), os.environ.get("LD_LIBRARY_PATH", "")])
        code = "from safetune.cli import main; main(['doctor', '--quick', '--json'])"
        env = {"LD_LIBRARY_PATH": path, "TRITON_INTERPRET": "0", **env}
        result = fresh_process(code, env=env, ends=1)
        return {check["name"]: check for check in json.loads(result.stdout)["checks"]}

    def test_each_device_has_a_line(self, fresh_process: FreshProcess) -> None:
        checks = self.checks(fresh_process)

        assert checks["driver"]["found"].startswith("CUDA 12.8")
        words = "Stub, sm_90, compute mode default, without MPS, without MIG"
        for index in (0, 1):
            assert (checks[f"GPU {index}"]["state"], checks[f"GPU {index}"]["found"]) == (
                "ok",
                words,
            )
        torch = checks["torch's CUDA"]
        assert torch["state"] == "fail"
        assert torch["found"].endswith("sees none of the driver's 2 devices")

    def test_a_driver_that_does_not_start(self, fresh_process: FreshProcess) -> None:
        driver = self.checks(fresh_process, LIBCUDA_FAIL="cuInit=999")["driver"]

        assert driver["state"] == "fail"
        assert "cuInit returned CUDA_ERROR_999" in driver["found"]
        assert "nvidia-smi" in driver["fix"]


class TestStores:
    def test_a_bad_setting_is_said_once(
        self, safetune: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SAFETUNE_MODE", "fast")

        checks = found(safetune, code=1)

        failures = [check for check in checks.values() if check["state"] == "fail"]
        assert [check["name"] for check in failures] == ["settings"]
        assert "SAFETUNE_MODE='fast' is not valid" in failures[0]["found"]

    def test_a_mode_that_never_tunes(self, safetune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SAFETUNE_MODE", "frozen")

        assert found(safetune)["settings"]["state"] == "warn"

    def test_a_cache_directory_that_cannot_be_made(
        self, safetune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(tmp_path / "file" / "cache"))

        check = found(safetune, code=1)["database"]

        assert check["found"] == f"cannot write to {tmp_path}/file: Not a directory"
        assert (
            check["fix"] == f"set another directory: {tmp_path}/file is a file, or lies below one"
        )

    def test_a_directory_that_others_write_to(
        self, safetune: Any, tuned: Any, cache_dir: Path
    ) -> None:
        cache_dir.chmod(0o777)

        check = found(safetune)["permissions"]

        assert (check["state"], check["fix"]) == ("warn", f"chmod 700 {cache_dir}")

    def test_the_shared_store_is_asked(
        self, safetune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SAFETUNE_SHARED", f"file://{tmp_path}/shared")
        missing = found(safetune, code=1)["shared store"]
        (tmp_path / "shared").mkdir()
        there = found(safetune)["shared store"]

        assert missing["state"] == "fail"
        assert f"{tmp_path}/shared" in missing["found"]
        assert missing["fix"].startswith(f"mkdir -p {tmp_path}/shared")
        assert there["state"] == "ok"
        assert there["found"].endswith(" ms")

    def test_a_missing_package_of_fsspec_is_named(
        self, safetune: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if find_spec("ocifs"):
            pytest.skip("ocifs is installed")
        monkeypatch.setenv("SAFETUNE_SHARED", "oci://bucket/folder")

        check = found(safetune, code=1)["shared store"]

        assert "; pip install ocifs; until " in check["found"]
        assert check["fix"] == "pip install ocifs"

    def test_a_scheme_that_nothing_knows(
        self, safetune: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SAFETUNE_SHARED", "foo://x")
        check = found(safetune, code=1)["shared store"]
        assert "fsspec has no protocol foo; did you mean s3, gs, abfs?" in check["found"]
        assert check["fix"] == "correct the part of the URL before ://"

    @pytest.mark.parametrize(
        ("statement", "name", "state", "fix"),
        [
            ("PRAGMA user_version=99", "database", "fail", "upgrade safetune, or set "),
            ("CREATE VIEW mine AS SELECT 1", "database", "fail", "move the file away, and do not "),
            ("PRAGMA application_id=1", "database", "fail", "move the file away, or set "),
            (
                "UPDATE choice SET record = replace(record, 'BLOCK', 'BLICK')",
                *("damaged rows", "warn", "look for disk errors"),
            ),
        ],
        ids=["newer", "views", "another program's", "damaged rows"],
    )
    def test_each_fault_of_a_database_has_its_own_remedy(
        self,
        safetune: Any,
        tuned: Any,
        cache_dir: Path,
        statement: str,
        name: str,
        state: str,
        fix: str,
    ) -> None:
        with contextlib.closing(sqlite3.connect(cache_dir / "safetune.db")) as connection:
            connection.execute(statement)
            connection.commit()

        check = found(safetune, code=int(state == "fail"))[name]

        assert check["state"] == state
        assert check["fix"].startswith(fix)
        if name == "damaged rows":
            assert check["found"].startswith("3 damaged rows")

    def test_each_fault_of_a_file_system_has_its_own_remedy(
        self, tuned_add: tuple[Path, Any], tmp_path: Path
    ) -> None:
        """One that is full, one that is only read with a database, and one that is only read."""
        if shutil.which("unshare") is None:
            pytest.skip("unshare is not installed")
        full, empty = tmp_path / "full", tmp_path / "empty"
        full.mkdir()
        empty.mkdir()
        doctor = f"{sys.executable} -m safetune doctor --quick --json"
        commands = f"""
            mount -t tmpfs -o size=400k,mode=700 none {full} || exit 9
            cp {tuned_add[0]}/safetune.db {full}
            head -c 1M /dev/zero > {full}/filled 2>/dev/null
            SAFETUNE_CACHE_DIR={full} {doctor} > {tmp_path}/1
            rm {full}/filled
            mount -o remount,ro {full}
            SAFETUNE_CACHE_DIR={full} {doctor} > {tmp_path}/2
            mount -t tmpfs -o size=400k,mode=700,ro none {empty}
            SAFETUNE_CACHE_DIR={empty} {doctor} > {tmp_path}/3
        """
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", commands], env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        if done.returncode == 9 or not (tmp_path / "1").exists():
            pytest.skip("a file system cannot be mounted here")
        fixes = []
        for number in (1, 2, 3):
            checks = json.loads((tmp_path / str(number)).read_text())["checks"]
            (check,) = [check for check in checks if check["name"] == "database"]
            fixes.append((check["state"], check["fix"]))
        writable = "remount {} writable, or set another directory"
        assert fixes == [
            ("fail", f"free some space in {full}"),
            ("fail", writable.format(full)),
            ("fail", writable.format(empty)),
        ]

    def test_a_broken_pack_is_named(
        self, safetune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "packs").mkdir()
        (tmp_path / "packs" / "broken.json").write_text("{}")
        monkeypatch.setenv("SAFETUNE_PACKS", str(tmp_path / "packs"))

        check = found(safetune, code=1)["packs"]

        assert check["found"].startswith(f"{tmp_path}/packs/broken.json: it is not a pack")


@pytest.mark.parametrize("columns", [60, 80, 120, None])
def test_lines_end_at_the_terminal_and_between_words(
    safetune: Any, monkeypatch: pytest.MonkeyPatch, columns: int | None
) -> None:
    monkeypatch.setenv("SAFETUNE_MODE", "frozen")
    whole = safetune("doctor", "--quick").stdout
    if columns is None:  # not a terminal: a line for each check and each fix
        lines = [line for line in whole.splitlines() if not line.startswith(("ok ", "warn "))]
        assert all(line.startswith("      -> ") for line in lines[:-1])
        return
    monkeypatch.setenv("COLUMNS", str(columns))

    shown = safetune("doctor", "--quick").stdout

    assert all(len(line) <= columns for line in shown.splitlines() if " /" not in line)
    numbers = re.compile(r"[\d.]+")  # which differ between two runs
    # A path that is longer than a line is cut.
    assert numbers.sub("", "".join(shown.split())) == numbers.sub("", "".join(whole.split()))

"""`safetune doctor`: what it finds on good and bad machines, and how it looks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
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
    data = safetune.json("doctor", "--quick", code=code)
    states = {check["state"] for check in data["checks"]}
    assert data["ok"] == ("fail" not in states) == (code == 0)
    assert all(check["fix"] for check in data["checks"] if check["state"] != "ok")
    return {check["name"]: check for check in data["checks"]}


def write(cache_dir: Path, statement: str) -> None:
    """Execute an SQL statement in the store."""
    with contextlib.closing(sqlite3.connect(cache_dir / "safetune.db")) as connection:
        connection.execute(statement)
        connection.commit()


def test_a_machine_without_a_gpu_is_fit_for_the_interpreter(
    safetune: Any, tuned_add: Any, cache_dir: Path
) -> None:
    checks = found(safetune)

    assert {"safetune", "torch", "triton", "GPU", "CPUs", "system calls"} < set(checks)
    assert " does not exist yet, " in checks["database"]["found"]
    assert not cache_dir.exists()
    shutil.copytree(tuned_add[0], cache_dir)
    checks = found(safetune)
    assert "3 keys, 6 trials, 3 choices, 0 recorded" in checks["database"]["found"]
    assert checks["permissions"]["state"] == "ok"


def test_isolation_is_tried_for_real_in_a_store_of_its_own(safetune: Any, cache_dir: Path) -> None:
    safetune.set(SAFETUNE_LEAVE="*")  # which the probe does not see
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


class TestGpu:
    """A driver whose two devices are memory of the host, beside a torch without CUDA."""

    def checks(self, run: FreshProcess, **env: str) -> dict[str, dict[str, str]]:
        path = os.pathsep.join([str(stub.folder()), os.environ.get("LD_LIBRARY_PATH", "")])
        env = {"LD_LIBRARY_PATH": path, "TRITON_INTERPRET": "0", **env}
        result = run("doctor", "--quick", "--json", env=env, ends=1)
        return {check["name"]: check for check in json.loads(result.stdout)["checks"]}

    def test_each_device_has_a_line(self, run: FreshProcess) -> None:
        checks = self.checks(run)

        assert checks["driver"]["found"].startswith("CUDA 12.8")
        words = "Stub, sm_90, compute mode default, without MPS, without MIG"
        for gpu in (checks["GPU 0"], checks["GPU 1"]):
            assert (gpu["state"], gpu["found"]) == ("ok", words)
        torch = checks["torch's CUDA"]
        assert torch["state"] == "fail"
        assert torch["found"].endswith("sees none of the driver's 2 devices")

    def test_a_driver_that_does_not_start(self, run: FreshProcess) -> None:
        driver = self.checks(run, LIBCUDA_FAIL="cuInit=999")["driver"]

        assert driver["state"] == "fail"
        assert "cuInit returned CUDA_ERROR_999" in driver["found"]
        assert "nvidia-smi" in driver["fix"]


#: A variable, the check that is about it, and a part of what it says and of its remedy.
SETTINGS = {
    "SAFETUNE_MODE=fast": ("settings", "SAFETUNE_MODE='fast' is not valid", ""),
    "SAFETUNE_CACHE_DIR={tmp}/file/cache": (
        "database",
        "cannot write to {tmp}/file: Not a directory",
        "set another directory: {tmp}/file is a file, or lies below one",
    ),
    "SAFETUNE_SHARED=file://{tmp}/no/shared": (
        "shared store",
        "{tmp}/no/shared",
        "mkdir -p {tmp}/no/shared",
    ),
    "SAFETUNE_SHARED=oci://bucket/folder": (
        "shared store",
        "; pip install ocifs; until ",
        "pip install ocifs",
    ),
    "SAFETUNE_SHARED=foo://x": (
        "shared store",
        "fsspec has no protocol foo; it has s3, gs, abfs and others",
        "correct the part of the URL before ://",
    ),
    "SAFETUNE_PACKS={tmp}/packs": ("packs", "{tmp}/packs/broken.json: it is not a pack", ""),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_bad_setting_fails_one_check(safetune: Any, tmp_path: Path, setting: str) -> None:
    if "oci:" in setting and find_spec("ocifs"):
        pytest.skip("ocifs is installed")
    (tmp_path / "file").touch()
    (tmp_path / "packs").mkdir()
    (tmp_path / "packs" / "broken.json").write_text("{}")
    name, words, fix = (text.replace("{tmp}", str(tmp_path)) for text in SETTINGS[setting])
    variable, _, value = setting.replace("{tmp}", str(tmp_path)).partition("=")
    safetune.set(**{variable: value})

    failures = [check for check in found(safetune, code=1).values() if check["state"] == "fail"]

    assert [check["name"] for check in failures] == [name]
    assert words in failures[0]["found"]
    assert fix in failures[0]["fix"]


class TestStores:
    def test_a_mode_that_never_tunes(self, safetune: Any) -> None:
        safetune.set(SAFETUNE_MODE="frozen")

        assert found(safetune)["settings"]["state"] == "warn"

    def test_a_directory_that_others_write_to(
        self, safetune: Any, tuned: Any, cache_dir: Path
    ) -> None:
        cache_dir.chmod(0o777)

        check = found(safetune)["permissions"]

        assert (check["state"], check["fix"]) == ("warn", f"chmod 700 {cache_dir}")

    def test_the_shared_store_is_asked(self, safetune: Any) -> None:
        safetune.share()

        check = found(safetune)["shared store"]

        assert check["state"] == "ok"
        assert check["found"].endswith(" ms")

    @pytest.mark.parametrize(
        ("statement", "fix"),
        [
            ("PRAGMA user_version=99", "upgrade safetune, or set "),
            ("CREATE VIEW mine AS SELECT 1", "move the file away, and do not "),
            ("PRAGMA application_id=1", "move the file away, or set "),
        ],
        ids=["newer", "views", "another program's"],
    )
    def test_each_fault_of_a_database_has_its_own_remedy(
        self, safetune: Any, tuned: Any, cache_dir: Path, statement: str, fix: str
    ) -> None:
        write(cache_dir, statement)

        check = found(safetune, code=1)["database"]

        assert (check["state"], check["fix"][: len(fix)]) == ("fail", fix)

    def test_damaged_rows_are_counted(self, safetune: Any, tuned: Any, cache_dir: Path) -> None:
        write(cache_dir, "UPDATE choice SET record = replace(record, 'BLOCK', 'BLICK')")

        check = found(safetune)["damaged rows"]

        assert check["state"] == "warn"
        assert check["found"].startswith("3 damaged rows")
        assert check["fix"].startswith("look for disk errors")

    def test_a_full_disk_without_a_database(self, safetune: Any) -> None:
        """No file may have a byte, as on a full disk."""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            checks = found(safetune, code=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert checks["database"]["state"] == "fail"

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
            fixes.append((check["state"], check["fix"].partition(";")[0]))
        writable = "remount {} writable, or set another directory"
        assert fixes == [
            ("fail", f"free some space in {full}"),
            ("fail", writable.format(full)),
            ("fail", writable.format(empty)),
        ]


def test_without_a_terminal_each_check_and_each_fix_is_a_line(safetune: Any) -> None:
    safetune.set(SAFETUNE_MODE="frozen")
    lines = safetune("doctor", "--quick").stdout.splitlines()
    others = [line for line in lines if not line.startswith(("ok ", "warn "))]
    assert all(line.startswith("      -> ") for line in others[:-1])


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_lines_end_at_the_terminal_and_between_words(safetune: Any, columns: int) -> None:
    safetune.set(SAFETUNE_MODE="frozen")
    whole = safetune("doctor", "--quick").stdout
    safetune.set(COLUMNS=columns)

    shown = safetune("doctor", "--quick").stdout

    assert all(len(line) <= columns for line in shown.splitlines() if " /" not in line)
    numbers = re.compile(r"[\d.]+")  # which differ between two runs
    # A path that is longer than a line is cut.
    assert numbers.sub("", "".join(shown.split())) == numbers.sub("", "".join(whole.split()))

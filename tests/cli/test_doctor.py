"""`safetune doctor`: what it finds on good and bad machines, and how it looks."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import triton

from safetune.cli.doctor import gpus, machine
from safetune.cli.output import version_of
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
    safetune: Any, targets: Path, cache_dir: Path
) -> None:
    checks = found(safetune)

    assert {"safetune", "torch", "triton", "driver", "CPUs", "memory", "open files"} < set(checks)
    assert checks["database"]["found"].endswith("does not exist yet, and can be created")
    assert not cache_dir.exists()
    safetune.json("tune", targets / "add.py", "--shape", "small")
    checks = found(safetune)
    assert "2 choices, can be written" in checks["database"]["found"]
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
    """As Triton is, where torch for ROCm brings it; the commands ended with a traceback."""
    (tmp_path / "no_package_has_this_name.py").write_text("__version__ = '3.6.0'")
    monkeypatch.syspath_prepend(tmp_path)
    assert version_of("no_package_has_this_name") == "3.6.0"
    assert version_of("triton") == triton.__version__


@pytest.mark.full
def test_isolation_is_tried_with_no_setting_but_that_of_amd_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe, seen = tmp_path / "probe.py", tmp_path / "seen"
    names = 'sorted(name for name in os.environ if name.startswith("SAFETUNE_"))'
    probe.write_text(f"import os, pathlib\npathlib.Path({str(seen)!r}).write_text(str({names}))\n")
    monkeypatch.setenv("SAFETUNE_EXPERIMENTAL_HIP", "1")
    monkeypatch.setenv("SAFETUNE_WAIT", "1")

    (check,) = machine.isolation(probe)

    assert check.state == "fail", "there is no kernel"
    assert seen.read_text() == "['SAFETUNE_CACHE_DIR', 'SAFETUNE_EXPERIMENTAL_HIP']"


class TestGpu:
    """A driver whose two devices are memory of the host, beside a torch without CUDA."""

    def checks(self, fresh_process: FreshProcess, **env: str) -> dict[str, dict[str, str]]:
        path = os.pathsep.join([str(stub.folder()), os.environ.get("LD_LIBRARY_PATH", "")])
        code = "from safetune.cli import main; main(['doctor', '--quick', '--json'])"
        env = {"LD_LIBRARY_PATH": path, "TRITON_INTERPRET": "0", **env}
        result = fresh_process(code, env=env)
        assert result.returncode == 1
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
        assert torch["found"].endswith("sees none of the 2 devices of the driver")

    def test_a_driver_that_does_not_start(self, fresh_process: FreshProcess) -> None:
        driver = self.checks(fresh_process, LIBCUDA_FAIL="cuInit=999")["driver"]

        assert driver["state"] == "fail"
        assert "cuInit returned CUDA_ERROR_999" in driver["found"]
        assert "nvidia-smi" in driver["fix"]

    def test_of_amd_gpus_it_says_that_nothing_is_isolated(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A torch for ROCm, which is looked at and not imported."""
        folder = tmp_path / "torch"
        folder.mkdir()
        (folder / "__init__.py").write_text("raise ImportError('this takes seconds')")
        (folder / "version.py").write_text("cuda: Optional[str] = None\nhip: Optional[str] = '7.1'")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "torch")
        monkeypatch.setenv("TRITON_INTERPRET", "0")

        (check,) = gpus.gpus()

        assert (check.state, check.found) == ("warn", "torch is built for ROCm")
        assert "SAFETUNE_EXPERIMENTAL_HIP=1" in check.fix


class TestStores:
    def test_a_bad_setting_is_said_once(
        self, safetune: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SAFETUNE_MODE", "fast")

        checks = found(safetune, code=1)

        failures = [check for check in checks.values() if check["state"] == "fail"]
        assert [check["name"] for check in failures] == ["settings"]
        assert "SAFETUNE_MODE='fast' is not known" in failures[0]["found"]

    def test_a_mode_that_never_tunes(self, safetune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SAFETUNE_MODE", "frozen")

        assert found(safetune)["settings"]["state"] == "warn"

    def test_a_cache_directory_that_cannot_be_made(
        self, safetune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(tmp_path / "file" / "cache"))

        check = found(safetune, code=1)["database"]

        assert check["found"] == f"{tmp_path}/file/cache cannot be created in {tmp_path}/file"

    def test_a_directory_that_others_write_to(
        self, safetune: Any, targets: Path, cache_dir: Path
    ) -> None:
        safetune.json("tune", f"{targets / 'add.py'}:add_one", "--shape", "small")
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
        assert there["state"] == "ok"
        assert there["found"].endswith(" ms")

    def test_a_missing_package_of_fsspec_is_named(
        self, safetune: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if find_spec("ocifs"):
            pytest.skip("ocifs is installed")
        monkeypatch.setenv("SAFETUNE_SHARED", "oci://bucket/folder")

        check = found(safetune, code=1)["shared store"]

        assert check["found"].endswith("; pip install ocifs")

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

    assert all(len(line) < columns for line in shown.splitlines() if " /" not in line)
    numbers = ("free", "ms")  # they differ between two runs
    words = [word for word in whole.split() if not any(each in word for each in numbers)]
    assert len(shown.split()) == len(whole.split())
    assert set(words) - set(shown.split()) <= {w for w in words if any(c.isdigit() for c in w)}

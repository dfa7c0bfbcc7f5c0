"""Checks of the machine: versions, limits, and isolation, by a real tuning."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetune import triton_internals
from safetune.both import elsewhere
from safetune.cli.command import in_another_process
from safetune.cli.doctor.report import Check, check
from safetune.cli.output import version_of
from safetune.show.words import size

#: The oldest and the newest versions that are supported.
_SUPPORTED = (("torch", (2, 8), ()), ("triton", (3, 6), triton_internals.NEWEST))

_MEMORY_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

_PROBE = Path(__file__).with_name("probe.py")
_PROBE_S = 180.0

#: Open files that a process with a few tuning processes and a store needs.
_OPEN_FILES = 256
_PROCESSES = 256
_SHARED_MEMORY = 64 << 20
_MEMORY = 4 << 30


def versions() -> Iterator[Check]:
    """Check the versions of Python, torch and Triton."""
    is_linux = sys.platform == "linux"
    system = f"Linux {platform.release()}" if is_linux else sys.platform
    own = f"{version_of('safetune')}, Python {platform.python_version()}, {system}"
    fix = "" if is_linux else "use Linux: safetune cannot isolate configs on other systems"
    yield check("safetune", own, fail=fix)
    for name, oldest, newest in _SUPPORTED:
        found, least = version_of(name), ".".join(map(str, oldest))
        version = tuple(map(int, re.findall(r"\d+", found)[:2]))
        most = f" to {'.'.join(map(str, newest))}" if newest else " and later"
        too_new = bool(newest) and version > newest
        yield check(
            name,
            f"{found} (supported: {least}{most})",
            fail=f"pip install '{name}>={least}'" * (version < oldest),
            warn="update safetune; until then, launches take Triton's slower path" * too_new,
        )


def limits() -> Iterator[Check]:
    """Check CPUs, memory, the limits of this process, and system calls that containers forbid."""
    from safetune.isolation.compile_pool import usable_cpus

    cpus = usable_cpus()
    at_once = f"; configs compile in {cpus} processes at once" * (cpus > 1)
    one = "give this job more CPUs: with one, configs compile one after the other" * (cpus == 1)
    yield check("CPUs", f"{cpus} usable of {os.cpu_count()}{at_once}", warn=one)
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in map(Path, _MEMORY_FILES):
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            most = min(most, int(text))
    little = "give this job 4 GiB: each compile process may need a GiB" * (most < _MEMORY)
    yield check("memory", size(most), warn=little)
    for name, kind, least, flag in (
        ("open files", resource.RLIMIT_NOFILE, _OPEN_FILES, "-n"),
        ("processes", resource.RLIMIT_NPROC, _PROCESSES, "-u"),
    ):
        soft, _ = resource.getrlimit(kind)
        unlimited = soft == resource.RLIM_INFINITY
        raised = "" if unlimited or soft >= least else f"ulimit {flag} {4 * least}"
        yield check(name, "no limit" if unlimited else f"at most {soft}", warn=raised)
    yield _shared_memory(Path("/dev/shm"))
    yield _calls()


def _shared_memory(directory: Path) -> Check:
    try:
        usage = shutil.disk_usage(directory)
    except OSError as error:
        return check(str(directory), str(error), warn="mount a tmpfs there; torch and NCCL need it")
    words = f"{size(usage.free)} free of {size(usage.total)}"
    fix = "start the container with `docker run --shm-size=1g`: torch and NCCL need the space"
    little = fix * (usage.free < _SHARED_MEMORY)
    return check(str(directory), words, warn=little)


def _calls() -> Check:
    """Check system calls that older kernels lack or a container's seccomp profile may forbid."""
    try:
        os.close(os.memfd_create("safetune-doctor", os.MFD_CLOEXEC))
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        fix = (
            "use Linux 5.3 or later, and allow pidfd_open and memfd_create in the container's "
            "seccomp profile"
        )
        return check("system calls", str(error), fail=fix)
    return check("system calls", "memfd_create and pidfd_open work")


def isolation() -> Iterator[Check]:
    """Tune a kernel with a config that crashes, in a process with a store of its own."""
    with tempfile.TemporaryDirectory(prefix="safetune-doctor-") as directory:
        variables = {k: v for k, v in os.environ.items() if not k.startswith("SAFETUNE_")}
        try:
            done = elsewhere.ask(
                in_another_process("tune", str(_PROBE), "--json"),
                _PROBE_S,
                {**variables, "SAFETUNE_CACHE_DIR": directory},
            )
        except TimeoutError:
            fix = "run nvidia-smi, and look for processes that cannot be killed"
            yield check("isolation", f"no kernel could be tuned within {_PROBE_S:.0f} s", fail=fix)
            return
    yield judged(done.returncode, done.stdout, done.stderr)


def judged(code: int, stdout: str, stderr: str) -> Check:
    """Return the result of tuning the probe."""
    try:
        trials = json.loads(stdout)["trials"]
        labels = {trial["config"].split()[0]: trial["label"] for trial in trials}
    except (ValueError, KeyError):
        last = (stderr.strip().splitlines() or [f"the command ended with {code}"])[-1]
        fix = "nothing can be tuned on this machine until this is fixed"
        return check("isolation", last.removeprefix("Error: "), fail=fix)
    words = ", ".join(f"{name} {label}" for name, label in labels.items())
    working = [name for name, label in labels.items() if label == "ok"]
    if code or working != ["FAULT=0"]:
        return check(
            "isolation", words, fail="report it as a bug in safetune, with the `--json` output"
        )
    return check("isolation", f"a tuning process crashed, and the tuning continued ({words})")

"""Checks of the machine: versions, limits, and isolation, by a real tuning."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetune import triton_internals
from safetune.both import elsewhere
from safetune.cli.command import in_another_process
from safetune.cli.doctor.report import Check, check
from safetune.cli.output import version_of

#: The oldest and the newest versions that are supported.
_SUPPORTED = (("torch", (2, 8), ()), ("triton", (3, 6), triton_internals.NEWEST))

_PROBE = Path(__file__).with_name("probe.py")
_PROBE_S = 180.0


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
    """Check the CPUs and the system calls that containers forbid."""
    from safetune.isolation.compile_pool import usable_cpus

    cpus = usable_cpus()
    at_once = f"; configs compile in {cpus} processes at once" * (cpus > 1)
    one = "give this job more CPUs: with one, configs compile one after the other" * (cpus == 1)
    yield check("CPUs", f"{cpus} usable of {os.cpu_count()}{at_once}", warn=one)
    yield _calls()


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

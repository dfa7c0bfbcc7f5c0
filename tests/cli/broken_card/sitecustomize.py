"""Has torch fail in the process by which the second worker of `--devices` tries its card."""

import os
import sys
from types import SimpleNamespace


def fail(*_, **__):
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


with open(f"/proc/{os.getppid()}/cmdline") as words:
    if "--worker=2/" in words.read() and any("arange" in word for word in sys.orig_argv):
        sys.modules["torch"] = SimpleNamespace(arange=fail)

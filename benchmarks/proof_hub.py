"""A pytest plugin: a repository of Hugging Face kernels on disk, loaded by their library.

`kernels` gives a kernel a module name of its own; its tests import it by its plain one.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

# Before a checkout of safetune, whose folder `kernels` is another thing.
sys.path.insert(0, str(metadata.distribution("kernels").locate_file("")))

import kernels

_module = kernels.get_local_kernel(Path(os.environ["PROOF_KERNEL"]))
for _name in [name for name in sys.modules if name.split(".")[0] == _module.__name__]:
    sys.modules["finegrained_fp8" + _name[len(_module.__name__) :]] = sys.modules[_name]

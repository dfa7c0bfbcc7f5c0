"""CUDA graphs without torch: begun, ended and launched by the driver's own calls."""

from __future__ import annotations

import ctypes
from typing import Any

# Values of cuda.h: CUstreamCaptureMode.
MODES = {"global": 0, "thread_local": 1, "relaxed": 2}


class RawGraph:
    """A context that captures the work of a torch stream, which it makes current."""

    def __init__(self, stream: Any, mode: str = "global") -> None:
        import torch

        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._stream = stream
        self._mode = MODES[mode]
        self._current = torch.cuda.stream(stream)
        self._executable = ctypes.c_void_p()

    def __enter__(self) -> RawGraph:
        self._current.__enter__()
        self._call("cuStreamBeginCapture_v2", self._handle(), ctypes.c_int(self._mode))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        graph = ctypes.c_void_p()
        try:
            self._call("cuStreamEndCapture", self._handle(), ctypes.byref(graph))
        finally:
            self._current.__exit__(kind, error, trace)
        self._call(
            "cuGraphInstantiateWithFlags",
            ctypes.byref(self._executable),
            graph,
            ctypes.c_ulonglong(0),
        )

    def replay(self) -> None:
        self._call("cuGraphLaunch", self._executable, self._handle())
        self._stream.synchronize()

    def _handle(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._stream.cuda_stream)

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._cuda, name)(*arguments)
        assert error == 0, f"{name} failed with CUresult {error}"

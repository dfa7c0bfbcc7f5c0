"""Turns exceptions of a config into outcomes."""

from __future__ import annotations

from dataclasses import replace

from safetune.both import backend
from safetune.outcome import Outcome, Verdict

_MAX_MESSAGE = 2000


def of_compile(error: BaseException) -> Outcome:
    """Return the outcome of a config whose compilation raised this error."""
    from triton.runtime.errors import OutOfResources

    verdict = (
        Verdict.OUT_OF_RESOURCES if isinstance(error, OutOfResources) else Verdict.COMPILE_ERROR
    )
    outcome = _outcome(verdict, error)
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, MemoryError):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:  # the compiler's own exception may not mention it
        return replace(outcome, message=f"{outcome.message}\n{MemoryError.__name__}".strip())
    return outcome


def of_launch(error: BaseException) -> Outcome:
    """Return the outcome of a config whose launch raised this error; checks if the context still
    works.
    """
    from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure
    from triton.runtime.errors import OutOfResources, PTXASError

    if isinstance(error, OutOfResources):
        return _outcome(Verdict.OUT_OF_RESOURCES, error)
    if isinstance(error, (CompilationError, CompileTimeAssertionFailure, PTXASError)):
        return _outcome(Verdict.COMPILE_ERROR, error)
    if is_lack_of_memory(error):
        return _outcome(Verdict.NO_MEMORY, error)
    if not backend.all_work():
        return _outcome(Verdict.ILLEGAL_ACCESS, error)
    return _outcome(Verdict.LAUNCH_ERROR, error)


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether an exception reports a lack of memory, which may pass."""
    refused = isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    return refused or isinstance(error, MemoryError)  # torch's is a RuntimeError


def _outcome(verdict: Verdict, error: BaseException) -> Outcome:
    name = type(error).__name__
    try:
        text = str(error).strip()
        if isinstance(error, KeyError) or " " not in text:  # a key or a value alone says nothing
            text = f"{name}: {text}".removesuffix(": ")
    except Exception as unprintable:  # str() runs code of the exception's class
        text = f"{name}, whose str() raises {type(unprintable).__name__}"
    return Outcome(verdict, detail=name, message=text[:_MAX_MESSAGE])

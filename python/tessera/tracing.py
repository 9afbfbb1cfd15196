"""What ran, from where, and why: a record of every call."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any

from . import _tessera

_open: list["Trace"] = []  # those that record now; calls look whether it is empty


class Trace:
    """Records every call that attends or appends while it is open, those of drop-in functions and of compiled code included.

    >>> with tessera.trace() as t:                                        # doctest: +SKIP
    ...     tessera.attention(q, k, v, mask="causal")
    >>> print(t)                                                          # doctest: +SKIP
    1 attention  cpu.avx512  from .../_tessera.abi3.so
        forward f32 b1 h8 q128 k128 d64 mask=causal
        ...
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __enter__(self) -> Trace:
        _open.append(self)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, at: TracebackType | None) -> None:
        _open.remove(self)

    def json(self, indent: int | None = 2) -> str:
        """The calls as a JSON list; each has call, line, engine, kernel, library, threads, workspace_bytes, steps,
        refused and fallback."""
        return json.dumps(self.calls, indent=indent)

    def __str__(self) -> str:
        return "\n".join(_text(n, call) for n, call in enumerate(self.calls, 1)) or "no calls"


def record(name: str, plan: Any, fallback: str | None = None) -> None:
    """Notes a call in every open trace. `fallback`: why another way than the one asked for was taken."""
    call = {
        "call": name,
        "line": plan.line,
        "engine": plan.engine,
        "kernel": plan.kernel,
        "library": _tessera.__file__,
        "device": plan.device,
        "threads": plan.threads,
        "workspace_bytes": plan.workspace_bytes,
        "steps": plan.steps(),
        "refused": [{"kernel": kernel, "reason": why} for kernel, why in plan.reasons()],
        "fallback": fallback,
        "plan": plan.text(),
    }
    for trace in _open:
        trace.calls.append(call)


def recording() -> bool:
    return bool(_open)


def _text(n: int, call: dict[str, Any]) -> str:
    head = f"{n} {call['call']}  {call['kernel']}  from {call['library']}"
    body = [f"    {line}" for line in call["plan"].splitlines()]
    if call["fallback"]:
        body.append(f"    fallback    {call['fallback']}")
    return "\n".join([head, *body])

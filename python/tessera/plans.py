"""Plans made before their arrays: tessera.plan."""

from __future__ import annotations

from typing import Any

from . import _tessera, tracing
from .calls import FORWARD_NAMES, Options, bridge, check_one_library, check_options, forward_problem, is_torch, mask_of
from .calls import plan_of, workspace_of
from .mask import Mask
from .problem import NAMES, Array, Wish, dense_strides


RESULTS = ("out", "lse", "max_score")


class Plan:
    """Which kernel answers, what it takes, why not the others; and, if made from arrays, running it again and again.

    Its facts are attributes: engine, kernel, device, threads, tile_rows, tile_keys, workspace_bytes, bytes_read,
    bytes_written, score_bytes_avoided, flops, roofline_seconds, line; steps() and reasons() are lists.
    """

    def __init__(self, native: _tessera.Plan, expected: dict[str, Array] | None = None):
        self._native = native
        self._expected = expected or {}
        self._names = tuple(self._expected)
        self._caller = _tessera.Caller(tuple(NAMES[n] for n in self._names), _checker(native, self._expected))

    def run(self, *, seed: int = 0, offset: int = 0, stream: int | None = None, **arrays: Any) -> None:
        """Runs on arrays of the shapes, strides, dtypes and device that the plan was made for. Results are given too: out,
        and lse and max_score if the plan has them. Allocates nothing but the workspace. ValueError if an array differs."""
        if not self._names:
            raise ValueError("the plan was made from a line, without arrays; make it from arrays to run it.")
        for name in arrays:
            if name not in self._expected:
                raise ValueError(f"{name} is no array of this plan; they are {', '.join(self._names)}.")
        for name in self._names:
            if arrays.get(name) is None:
                raise ValueError(f"{name} is missing; the plan reads or writes it.")
        given = tuple(arrays[n] for n in self._names)
        check_one_library(dict(zip(self._names, given)))
        if stream is None and is_torch(given[0]):
            stream = bridge().stream_of(given[0])
        self._caller.call(given, seed, offset, stream)
        if is_torch(given[0]):
            bridge().written(arrays.get(n) for n in RESULTS)
        if tracing._open:
            tracing.record("plan.run", self._native)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._native, name)

    def __str__(self) -> str:
        return str(self._native)

    def __repr__(self) -> str:
        return f"<tessera.Plan {self._native.kernel}: {self._native.line}>"


HINTS = ("kernels", "threads", "workspace_limit")


def _checker(native: _tessera.Plan, expected: dict[str, Array]) -> Any:
    """What the plan's Caller asks when it sees arrays that it has not seen: are they those that the plan is for?"""

    def check(arrays: tuple, described: tuple) -> tuple:
        for name, d in zip(expected, described):
            a, e = Array(*d), expected[name]
            steps = [(n, s) for n, s in zip(a.shape, a.strides) if n != 1]
            same = steps == [(n, s) for n, s in zip(e.shape, e.strides) if n != 1] and len(a.shape) == len(e.shape)
            if not same or a[:3] != e[:3] or a.shape != e.shape:
                raise ValueError(f"{name} is {_words(a)}; the plan was made for {_words(e)}. Make another plan.")
            if a.alignment < e.alignment:
                raise ValueError(
                    f"{name} lies at a multiple of {a.alignment} bytes; the plan was promised {e.alignment}. Make another "
                    f"plan with this array."
                )
            if a.read_only and name in RESULTS:
                raise ValueError(f"{name} is read-only and this call writes it; pass a writable array.")
        return native, (), *workspace_of(native, arrays[0])

    return check


def _words(a: Array) -> str:
    return f"{_tessera.DTYPES[a.dtype]} {a.shape} with strides {a.strides} on device ({a.device}, {a.device_id})"


def plan(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    mask: Mask | str | None = None,
    bias: Any = None,
    slopes: Any = None,
    sinks: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    device: str = "host",
    **options: Any,
) -> Plan:
    """What would run, without running it: from arrays and options as of :func:`attention`, or from a problem line.

    >>> print(tessera.plan("forward bf16 b4 h32/8 q4096 k4096 d128 mask=causal").kernel)   # doctest: +SKIP
    cpu.avx512bf16

    A plan made from arrays runs on others like them: p.run(q=q, k=k, v=v, out=out). Options return_lse, out_dtype, ... are
    those of :func:`attention`; of a line only kernels, threads and workspace_limit are (the line says the rest).
    """
    taken = {**dict.fromkeys(Options._fields[1:]), "return_lse": "lse", "return_max_score": "max_score"}
    del taken["lse"], taken["max_score"]
    for name in options:
        if name not in taken:
            raise ValueError(f"{name} is no option; they are {', '.join(taken)}.")
    known = {taken[name] or name: value for name, value in options.items()}
    if isinstance(q, str):
        arrays = {"k": k, "v": v, "mask": mask, "bias": bias, "slopes": slopes, "sinks": sinks}
        said = [n for n, a in arrays.items() if a is not None] + [n for n in known if n not in HINTS]
        if said:
            raise ValueError(f"{said[0]} is given beside a line, which says it itself; only {', '.join(HINTS)} are taken.")
        wishes = Options(**known)
        check_options(wishes)
        limit = -1 if wishes.workspace_limit is None else wishes.workspace_limit
        return Plan(_tessera.Plan(_tessera.Problem(q), device, wishes.kernels, wishes.threads, limit))
    if device != "host":
        raise ValueError(f"device is {device!r}; arrays are planned for where they are. Leave it out, or plan a line.")
    m = None if mask is None else mask_of(mask)
    given = dict(zip(FORWARD_NAMES, (q, k, v, bias, slopes, sinks)))
    given |= m.arrays if m else {}
    given |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    given |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
    given = {name: array for name, array in given.items() if array is not None}
    described = {name: Array(*_tessera.describe(array)) for name, array in given.items()}
    settings = Options("none" if m is None else m.text, **known)
    check_options(settings)
    check_one_library(given)
    problem, shapes, returned = forward_problem(settings, given, described)
    for wish in returned:
        if isinstance(wish, Wish):
            shape = shapes[wish.name]
            q_ = described["q"]
            described[wish.name] = Array(
                wish.dtype, q_.device, q_.device_id, shape, dense_strides(shape), False, q_.alignment
            )
    return Plan(plan_of(problem, settings, q, described["q"]), described)



"""Calls that are planned once: options become a Caller, which finds the plan by the arrays' shapes and strides."""

from __future__ import annotations

import numbers
import sys
from typing import Any, Callable, NamedTuple

from . import _tessera
from .mask import ARRAYS, Mask
from .problem import BACKWARD, CPU, DTYPES, FORWARD, LAYOUTS, NAMES, Array, Bounds, Form, Wish, build, device_of

INPUTS = (
    "q", "k", "v", "bias", "slopes", "sinks", *ARRAYS, "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k",
)  # fmt: skip
DIFFERENTIABLE = INPUTS[:6]
most_callers = 512  # past it all are forgotten: options that never come back hold no memory


class Options(NamedTuple):
    """What a forward or backward call depends on besides its arrays. Hashable; see :func:`tessera.attention`."""

    mask: str = "none"
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    layout: str = "bshd"
    max_len_q: int | None = None
    max_len_k: int | None = None
    out_dtype: str | None = None
    lse: bool = False
    max_score: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    allow_tf32: bool = False
    kernels: str | None = None
    threads: int = 0
    workspace_limit: int | None = None


def words(options: Any) -> str:
    """Options, of a call or of a cache's, as words of a problem line."""
    said = [f"mask={options.mask}"]
    for name in ("scale", "softcap", "dropout"):
        value = getattr(options, name, None)
        if value is not None and (value or name != "dropout"):
            said.append(f"{name}={float(value)!r}")
    return " ".join(said + [w for w in MODES if getattr(options, w, False)])


MODES = ("deterministic", "batch_invariant", "allow_tf32")

masks: dict[str, Mask] = {}  # by text


def mask_of(mask: Mask | str) -> Mask:
    if isinstance(mask, str):
        known = masks.get(mask)
        if known is None:
            if len(masks) >= most_callers:
                masks.clear()
            known = masks[mask] = Mask(mask)
        return known
    if isinstance(mask, Mask):
        return mask
    raise ValueError(
        f"mask is a {type(mask).__name__}; it must be a tessera.Mask, a text such as 'causal', or None. A bool array "
        f"that keeps keys where it is True is Mask.keep(array); an array that is added to the scores is bias=array."
    )


NUMBERS = ("scale", "softcap", "dropout")
COUNTS = {"max_len_q": 2**31, "max_len_k": 2**31, "max_len_new": 2**31, "threads": 1025, "workspace_limit": 2**63}
SWITCHES = ("lse", "max_score", "deterministic", "batch_invariant", "allow_tf32")
TEXTS = ("kernels", "out_dtype")


def check_options(options: Any) -> None:
    """Types and ranges, before the options become a key: a key must not be equal to one of another type that is wrong, nor
    hold a tensor, whose number may change while the tensor stays the same."""
    for name in NUMBERS:
        value = getattr(options, name, None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
            raise ValueError(f"{name} is a {type(value).__name__}; it must be a Python number. Pass float({name}).")
    for name, end in COUNTS.items():
        value = getattr(options, name, None)
        if value is None and name != "threads":
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 0 <= int(value) < end:
            raise ValueError(f"{name} is {value!r}; it must be a whole number from 0 to {end - 1}.")
    for name in SWITCHES:
        if not isinstance(getattr(options, name, False), bool):
            argument = "return_" + name if name in ("lse", "max_score") else name
            raise ValueError(f"{argument} is {getattr(options, name)!r}; it must be True or False.")
    for name in TEXTS:
        value = getattr(options, name, None)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} is a {type(value).__name__}; it must be a text, or None.")
    if options.out_dtype is not None and options.out_dtype not in DTYPES:
        raise ValueError(f"out_dtype is {options.out_dtype!r}; it must be q's, or 'f32' ('f64' of float64).")
    if not isinstance(options.layout, str) or options.layout not in LAYOUTS:
        raise ValueError(
            f"layout is {options.layout!r}; it must be 'bshd', (batch, seq, heads, dim), or 'bhsd', (batch, heads, seq, dim). "
            f"Packed arrays have no batch axis."
        )


def check_one_library(given: dict[str, Any]) -> None:
    torch_arrays = {name: is_torch(array) for name, array in given.items()}
    first = next(iter(given))
    for name, answer in torch_arrays.items():
        if answer != torch_arrays[first]:
            kinds = {True: "a torch tensor", False: f"a {type(given[first if torch_arrays[name] else name]).__name__}"}
            raise ValueError(
                f"{name} is {kinds[answer]} and {first} {kinds[not answer]}; all arrays of a call are of one library. "
                f"Convert {name}."
            )


def explain(error: Exception, options: Any, given: dict[str, Any]) -> None:
    """Says better what a fast path tripped over, if it can."""
    check_options(options)
    check_one_library(given)
    raise error


# ------------------------------------------------------------------------------------------------- making results


def empty(like: Any, dtype: str, shape: tuple[int, ...]) -> tuple[Callable[..., Any], tuple, dict[str, Any]]:
    """A call that makes an array of the same library, on the same device, as `like`."""
    if is_torch(like):
        return bridge().empty(like, dtype, shape)
    import numpy

    return numpy.empty, (shape,), {"dtype": numpy_dtype(dtype)}


def numpy_dtype(dtype: str) -> Any:
    import numpy

    if dtype in ("bf16", "e4m3"):
        try:
            import ml_dtypes
        except ImportError:
            raise NotImplementedError(f"NumPy has no {dtype}; install ml_dtypes, which brings it.") from None
        return numpy.dtype({"bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn}[dtype])
    return numpy.dtype({"f64": "float64", "f32": "float32", "f16": "float16", "i32": "int32", "bool": "bool"}[dtype])


_torch_types: dict[type, bool] = {}


def is_torch(array: Any) -> bool:
    """Whether it is a torch tensor. torch is never imported for it: whoever has a tensor has imported torch."""
    known = _torch_types.get(type(array))
    return _learn(array) if known is None else known


def _learn(array: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):
        return False
    known = _torch_types[type(array)] = isinstance(array, torch.Tensor)
    return known


def bridge() -> Any:
    """The module that knows torch."""
    from . import torch

    return torch


def accumulation(dtype: int) -> int:
    return DTYPES["f64"] if dtype == DTYPES["f64"] else DTYPES["f32"]


def plan_of(problem: Any, options: Any, like: Any, home: Array) -> _tessera.Plan:
    """The plan for arrays of `like`'s library, on its device."""
    if home.device != CPU and not is_torch(like):
        raise NotImplementedError(
            f"a {type(like).__name__} is on {device_of(home)}; on a GPU Tessera takes torch tensors, whose memory and "
            f"stream it uses. Pass torch.from_dlpack of it."
        )
    options = getattr(options, "options", options)
    limit = -1 if options.workspace_limit is None else options.workspace_limit
    return _tessera.Plan(problem, device_of(home), options.kernels, options.threads, limit)


def form_of(layout: str, described: dict[str, Array], cache: bool = False) -> Form:
    return Form(
        layout,
        "cu_seqlens_q" in described,
        "cu_seqlens_k" in described,
        "cu_seqlens_new" in described,
        cache,
        "page_table" in described,
    )


def need(described: dict[str, Array], *names: str) -> None:
    for name in names:
        if name not in described:
            raise ValueError(f"{name} is None; it must be given.")


def planned(problem_of: Callable[..., Any], options: Any, names: tuple[str, ...]) -> Callable[..., Any]:
    """What a Caller asks for once for each set of shapes: the plan, and how its results are allocated.

    problem_of(options, given, described) returns the problem, the shapes of its results, and what a call returns: a
    Wish each, ... for the plan, None for nothing."""

    def make(arrays: tuple, described: tuple) -> tuple:
        given = {n: a for n, a in zip(names, arrays) if a is not None}
        known = {n: Array(*d) for n, d in zip(names, described) if d is not None}
        check_one_library(given)
        problem, shapes, returned = problem_of(options, given, known)
        like = next(iter(given.values()))

        def output(wish: Any) -> Any:
            if not isinstance(wish, Wish):
                return wish
            return NAMES[wish.name], *empty(like, _tessera.DTYPES[wish.dtype], shapes[wish.name])

        plan = plan_of(problem, options, like, next(iter(known.values())))
        return plan, tuple(map(output, returned)), *workspace_of(plan, like)

    return make


def workspace_of(plan: Any, like: Any) -> tuple:
    """What a Caller is told of a plan's workspace: on a GPU the arrays' own library gives it."""
    if plan.engine != "cuda" or plan.workspace_bytes == 0:
        return ()
    return ((0, *empty(like, "i32", (-(-plan.workspace_bytes // 4),))),)


callers: dict[Any, Callable[..., Any]] = {}  # by what tells their options from all others


def caller_of(
    key: Any, names: tuple[str, ...], problem_of: Callable[..., Any], options: Any, result: type = tuple, ours: int = 0
) -> Callable[..., Any]:
    """call(arrays, seed, offset, stream) for these options, which returns a `result`. The first `ours` arrays are known
    from a call before."""
    check_options(getattr(options, "options", options))
    if len(callers) >= most_callers:
        callers.clear()
    caller = _tessera.Caller(tuple(NAMES[n] for n in names), planned(problem_of, options, names), result, ours)
    callers[key] = caller.call
    return caller.call


class Result(NamedTuple):
    """What a call returns."""

    out: Any
    """(B, Sq, Hq, Dv) in the call's layout, packed (rows, Hq, Dv); q's dtype, or the out_dtype asked for."""
    lse: Any
    """(B, Hq, Sq), packed (Hq, rows): natural log; -inf of a row that sees no key. float32, of float64 float64.
    None unless return_lse."""
    plan: Any
    """Which kernel ran, what it took and why not the others: plan.kernel, print(plan), plan.reasons(). None while
    torch.compile traces; tessera.trace() tells what ran."""


class ResultWithMax(NamedTuple):
    """What a call with return_max_score returns."""

    out: Any
    lse: Any
    plan: Any
    max_score: Any
    """As lse: the largest score of a row's kept keys; -inf if there is none."""


# ----------------------------------------------------------------------------------------------- forward, backward


def forward_problem(options: Options, given: dict[str, Any], described: dict[str, Array]) -> tuple:
    need(described, "q", "k", "v")
    q = described["q"].dtype
    out_dtype = q if options.out_dtype is None else DTYPES[options.out_dtype]
    check_out(options, described)
    out = None if "out" in described else Wish("out", out_dtype)
    lse = Wish("lse", accumulation(q)) if options.lse else None
    max_score = Wish("max_score", accumulation(q)) if options.max_score else None
    wishes = tuple(w for w in (out, lse, max_score) if w)
    form = form_of(options.layout, described)
    bounds = Bounds(options.max_len_q, options.max_len_k)
    problem, shapes = build(FORWARD, words(options), form, given, described, wishes, bounds, written=("status", "out"))
    return problem, shapes, (out or FORWARD_NAMES.index("out"), lse, ..., *((max_score,) if max_score else ()))


def check_out(options: Any, described: dict[str, Array]) -> None:
    given = described.get("out")
    if given is not None and options.out_dtype is not None and DTYPES[options.out_dtype] != given.dtype:
        raise ValueError(
            f"out is {_tessera.DTYPES[given.dtype]} and out_dtype is {options.out_dtype!r}; say one of them."
        )


FORWARD_NAMES = (*INPUTS, "status", "out")


def forward_caller(key: tuple) -> Callable[..., Any]:
    """Its calls return a Result, or ResultWithMax. `key`: Options, or a plain tuple like it."""
    call = callers.get(key)
    if call is None:
        options = Options(*key)
        result = ResultWithMax if options.max_score else Result
        call = caller_of(key, FORWARD_NAMES, forward_problem, options, result)
    return call


BACKWARD_NAMES = (*INPUTS, "out", "lse", "dout", "dlse")


class Backward(NamedTuple):
    """A backward call: the options of its forward, and which of DIFFERENTIABLE want gradients."""

    options: Options
    wanted: tuple[bool, ...]


def backward_problem(key: Backward, given: dict[str, Any], described: dict[str, Array]) -> tuple:
    options = key.options
    grads = tuple(
        Wish("d" + name, described[name].dtype) if wanted and name in described else None
        for name, wanted in zip(DIFFERENTIABLE, key.wanted)
    )
    form = form_of(options.layout, described)
    wishes = tuple(w for w in grads if w)
    bounds = Bounds(options.max_len_q, options.max_len_k)
    problem, shapes = build(BACKWARD, words(options), form, given, described, wishes, bounds)
    return problem, shapes, (*grads, ...)


def backward_caller(key: tuple) -> Callable[..., Any]:
    """Its calls return the gradients of DIFFERENTIABLE, None where not wanted, and the plan. `key`: Backward, or like it."""
    ours = BACKWARD_NAMES.index("dout")
    return callers.get(key) or caller_of(
        key, BACKWARD_NAMES, backward_problem, Backward(Options(*key[0]), key[1]), tuple, ours
    )

"""Torch: gradients, streams, and the operators that torch.compile and torch.export see. Alone in knowing torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from . import _tessera, tracing
from .calls import DIFFERENTIABLE, INPUTS, Options, Result, ResultWithMax, backward_caller, callers, forward_caller, most_callers
from .parts import run_merge, run_merge_backward
from .problem import dense_strides

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i32": torch.int32,
    "bool": torch.bool,
    "e4m3": torch.float8_e4m3fn,
}
_tessera.set_dtypes({DTYPES[text]: n for n, text in enumerate(_tessera.DTYPES) if text in DTYPES})


def empty(like: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> tuple:
    # Half the time of torch.empty, which looks for many more arguments.
    return torch.empty_strided, (shape, dense_strides(shape)), {"dtype": DTYPES[dtype], "device": like.device}


def stream_of(tensor: torch.Tensor) -> int | None:
    """The stream that the tensor's device is used with now."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else None


# ------------------------------------------------------------------------------------------------------------ eager

LSE = Options._fields.index("lse")
PLAIN = (torch.Tensor, torch.nn.Parameter)  # others (fake, distributed, ...) are for the dispatcher
grad_enabled = torch.is_grad_enabled
is_compiling = torch.compiler.is_compiling


def must_dispatch(tensor: torch.Tensor) -> bool:
    """Whether torch itself must see an operator: it traces, or the tensor is of a kind of its own."""
    return is_compiling() or type(tensor) not in PLAIN


def ops() -> Any:
    from . import ops

    return ops


def runner_of(kind: type) -> Any:
    return attention if kind in PLAIN else dispatched


def dispatched(key: tuple, seed: int, offset: int, arrays: tuple) -> Any:
    return ops().attention(key, seed, offset, arrays)


def attention(key: tuple, seed: int, offset: int, arrays: tuple) -> Any:
    """arrays: INPUTS, status and out."""
    if is_compiling():
        return dispatched(key, seed, offset, arrays)
    q, k, v, bias, slopes, sinks = arrays[:6]
    if forward_ad._current_level >= 0:
        refuse_tangents(arrays)
    if grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and bias.requires_grad)
        or (slopes is not None and slopes.requires_grad)
        or (sinks is not None and sinks.requires_grad)
        or (arrays[-1] is not None and arrays[-1].requires_grad)
    ):
        if arrays[-1] is not None:
            raise ValueError("out is given, but arrays require gradients; take the result that is returned instead.")
        made = Attention.apply((key, seed, offset, arrays), q, k, v, bias, slopes, sinks)
        return Result(*made) if len(made) == 3 else ResultWithMax(*made)
    made = (callers.get(key) or forward_caller(key))(arrays, seed, offset, None if q.is_cpu else stream_of(q))
    if arrays[-1] is not None or arrays[-2] is not None:
        written(arrays[-2:])
    if tracing._open:
        tracing.record("attention", made[2])
    return made


def written(tensors: Any) -> None:
    """Tells autograd that they changed, as torch's own in-place operators do."""
    for tensor in tensors:
        if tensor is not None:
            torch.autograd.graph.increment_version(tensor)


def refuse_tangents(arrays: Any) -> None:
    """Forward-mode derivatives would be lost in silence."""
    if forward_ad._current_level < 0:
        return
    for tensor in arrays:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                "a tensor carries a tangent (forward-mode differentiation); attention has a backward pass only."
            )


def refuse_second() -> None:
    if grad_enabled():
        raise NotImplementedError("second derivatives (create_graph=True) are asked for; the backward pass has none.")


NOTHING_ELSE = (None,) * (len(INPUTS) - 3)  # beside q, k and v: what is absent need not be kept
with_lse: dict[tuple, Any] = {}  # the forward call of a key that also returns lse, which backward needs


def forward_with_lse(key: tuple) -> Any:
    if len(with_lse) >= most_callers:
        with_lse.clear()
    call = with_lse[key] = forward_caller(Options(*key)._replace(lse=True))
    return call


class Attention(torch.autograd.Function):
    """Forward keeps q, k, v, out and lse (and the options' arrays); backward recomputes the rest tile by tile."""

    @staticmethod
    def forward(ctx: Any, call: tuple, *tensors: Any) -> tuple:
        key, seed, offset, arrays = call
        stream = None if arrays[0].is_cpu else stream_of(arrays[0])
        made = (with_lse.get(key) or forward_with_lse(key))(arrays, seed, offset, stream)
        if tracing._open:
            tracing.record("attention", made[2])
        if arrays[3 : len(INPUTS)] == NOTHING_ELSE:
            ctx.save_for_backward(*arrays[:3], made[0], made[1])
        else:
            ctx.save_for_backward(*arrays[: len(INPUTS)], made[0], made[1])
        ctx.call = key, seed, offset
        ctx.set_materialize_grads(False)
        out, lse, plan, *max_score = made
        if max_score:
            ctx.mark_non_differentiable(*max_score)
        return out, lse if key[LSE] else None, plan, *max_score

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, *_: Any) -> tuple:
        refuse_second()
        saved = ctx.saved_tensors
        if len(saved) == 5:
            saved = (*saved[:3], *NOTHING_ELSE, *saved[3:])
        key, seed, offset = ctx.call
        return (None, *backward(key, seed, offset, saved, dout, dlse, ctx.needs_input_grad[1:]))


def backward(key: tuple, seed: int, offset: int, saved: tuple, dout: Any, dlse: Any, wanted: tuple) -> tuple:
    """Gradients of DIFFERENTIABLE; None where not wanted. saved: INPUTS, out, lse."""
    if dout is None:
        if dlse is None:
            return (None,) * len(DIFFERENTIABLE)
        dout = torch.zeros_like(saved[-2])
    if torch.are_deterministic_algorithms_enabled():
        key = Options(*key)._replace(deterministic=True)
    which = key, wanted
    stream = None if dout.is_cpu else stream_of(dout)
    made = (callers.get(which) or backward_caller(which))((*saved, dout, dlse), seed, offset, stream)
    if tracing._open:
        tracing.record("attention backward", made[-1])
    return made[:-1]


# ------------------------------------------------------------------------------------------------------------ merge


def merge(outs: tuple, lses: tuple, layout: str, threads: int) -> tuple:
    refuse_tangents((*outs, *lses))
    if grad_enabled() and any(t.requires_grad for t in (*outs, *lses)):
        return Merge.apply(layout, threads, len(outs), *outs, *lses)
    return run_merge(outs, lses, layout, threads)


class Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: str, threads: int, parts: int, *tensors: Any) -> tuple:
        ctx.save_for_backward(*tensors)
        ctx.rest = layout, threads, parts
        ctx.set_materialize_grads(False)
        return run_merge(tensors[:parts], tensors[parts:], layout, threads)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple:
        refuse_second()
        layout, threads, parts = ctx.rest
        tensors = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(tensors[0])
        douts, dlses = run_merge_backward(tensors[:parts], tensors[parts:], dout, dlse, layout, threads)
        return (None, None, None, *douts, *dlses)

"""The operators tessera::attention, attention_backward, decode and append: what torch.compile and torch.export see.

Eager code takes the direct path of torch.py, which costs less. Options travel as one text, lengths and seeds as numbers
that may change without compiling again.
"""

from __future__ import annotations

import ast
import functools
from typing import Any

import torch

from . import tracing
from .cache import NAMES_OF_DECODE, STORED, CacheOptions, cache_caller
from .calls import DIFFERENTIABLE, INPUTS, Options, Result, ResultWithMax, forward_caller
from .problem import Cache, Form, axes
from .torch import DTYPES, backward, stream_of

library = torch.library.Library("tessera", "DEF")


def arguments(names: tuple[str, ...], needed: tuple[str, ...], written: tuple[str, ...] = ()) -> str:
    words = []
    for n, name in enumerate(names):
        alias = f"({chr(ord('a') + written.index(name))}!)" if name in written else ""
        words.append(f"Tensor{alias}{'' if name in needed else '?'} {name}")
    return ", ".join(words)


BOUNDS = "SymInt? max_len_q, SymInt? max_len_k"
NUMBERS = "float? scale, float? softcap, float dropout, SymInt threads"
RANDOM = "SymInt seed, SymInt offset"
library.define(
    f"attention({arguments(INPUTS, INPUTS[:3])}, str options, {NUMBERS}, {BOUNDS}, {RANDOM}) -> (Tensor, Tensor, Tensor)"
)
library.define(
    f"attention_backward({arguments((*INPUTS, 'out', 'lse'), (*INPUTS[:3], 'out', 'lse'))}, Tensor? dout, Tensor? dlse, "
    f"bool[] wanted, str options, {NUMBERS}, {BOUNDS}, {RANDOM}) -> Tensor[]"
)


# Places in a key; what is traced must be plain tuples for torch 2.4.
LSE = Options._fields.index("lse")


def spell(options: tuple) -> str:
    """As Python writes it, which the tracer of torch.compile can."""
    return repr(tuple(options))


@functools.lru_cache(1024)
def read(text: str) -> Options:
    return Options(*ast.literal_eval(text))


def options_of(text: str, scale: Any, softcap: Any, dropout: float, threads: int, len_q: Any, len_k: Any) -> Options:
    return read(text)._replace(
        scale=scale, softcap=softcap, dropout=dropout, threads=threads, max_len_q=len_q, max_len_k=len_k
    )


# -------------------------------------------------------------------------------------------------------- attention


def attention(key: tuple, seed: int, offset: int, arrays: tuple) -> Any:
    """(out, lse, plan) as the eager path, and max_score if asked for; the plan is None: it is made when the graph runs."""
    for name, array in zip(("status", "out"), arrays[-2:]):
        if array is not None:
            raise NotImplementedError(f"{name} cannot be given while torch.compile traces; leave it out.")
    mask, scale, softcap, dropout, layout, len_q, len_k, out_dtype, _, max_score, *modes, kernels, threads, limit = key
    text = spell((mask, None, None, 0.0, layout, None, None, out_dtype, True, max_score, *modes, kernels, 0, limit))
    made = torch.ops.tessera.attention(
        *arrays[: len(INPUTS)], text, scale, softcap, dropout, threads, len_q, len_k, seed, offset
    )
    lse = made[1] if key[LSE] else None
    return ResultWithMax(made[0], lse, None, made[2]) if key[LSE + 1] else Result(made[0], lse, None)


def _attention(*given: Any) -> tuple:
    arrays, (text, *numbers, seed, offset) = given[: len(INPUTS)], given[len(INPUTS) :]
    options = options_of(text, *numbers)
    made = forward_caller(options)((*arrays, None, None), seed, offset, stream_of(arrays[0]))
    if tracing._open:
        tracing.record("attention (compiled)", made[2])
    return made[0], made[1], made[3] if options.max_score else made[0].new_empty(0)


def _attention_fake(*given: Any) -> tuple:
    arrays, options = given[: len(INPUTS)], read(given[len(INPUTS)])
    q, v = arrays[0], arrays[2]
    packed = arrays[INPUTS.index("cu_seqlens_q")] is not None
    form = Form(options.layout, packed, packed, False, False, False)
    letters = axes("q", form, 0)
    sizes = dict(zip(letters, q.shape)) | {"v": v.shape[-1]}
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty([sizes[n] for n in axes("out", form, 0)], dtype=DTYPES[options.out_dtype] if options.out_dtype else q.dtype)
    lse = q.new_empty([sizes[n] for n in axes("lse", form, 0)], dtype=exact)
    return out, lse, torch.empty_like(lse) if options.max_score else q.new_empty(0)


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[: len(INPUTS)], output[0], output[1])
    ctx.rest = inputs[len(INPUTS) :]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])


def _differentiate(ctx: Any, dout: Any, dlse: Any, _: Any) -> tuple:
    wanted = list(ctx.needs_input_grad[: len(DIFFERENTIABLE)])
    grads = torch.ops.tessera.attention_backward(*ctx.saved_tensors, dout, dlse, wanted, *ctx.rest)
    named = [grad if want else None for grad, want in zip(grads, wanted)]
    return (*named, *[None] * (len(INPUTS) - len(DIFFERENTIABLE) + len(ctx.rest)))


def _attention_backward(*given: Any) -> list:
    saved, (dout, dlse, wanted, text, *numbers, seed, offset) = given[: len(INPUTS) + 2], given[len(INPUTS) + 2 :]
    made = backward(options_of(text, *numbers), seed, offset, saved, dout, dlse, tuple(wanted))
    return [saved[0].new_empty(0) if grad is None else grad for grad in made]


def _attention_backward_fake(*given: Any) -> list:
    saved, wanted = given[: len(INPUTS) + 2], given[len(INPUTS) + 4]
    return [
        saved[0].new_empty(0) if array is None or not want else array.new_empty(array.shape)
        for array, want in zip(saved, wanted)
    ]


library.impl("attention", _attention, "CompositeExplicitAutograd")
library.impl("attention_backward", _attention_backward, "CompositeExplicitAutograd")
torch.library.register_fake("tessera::attention", _attention_fake, lib=library)
torch.library.register_fake("tessera::attention_backward", _attention_backward_fake, lib=library)
torch.library.register_autograd("tessera::attention", _differentiate, setup_context=_keep, lib=library)

# ------------------------------------------------------------------------------------------------------------ caches

CACHE_NUMBERS = f"float? scale, float? softcap, SymInt threads, {BOUNDS}, SymInt? max_len_new"
WRITTEN = ("k", "v", "status")
library.define(
    f"decode({arguments(NAMES_OF_DECODE[:-1], ('q', 'k', 'v'), WRITTEN)}, str options, {CACHE_NUMBERS}) -> (Tensor, Tensor)"
)
library.define(f"append({arguments(STORED, ('k', 'v', 'k_new'), WRITTEN)}, str options, {CACHE_NUMBERS}) -> ()")


@functools.lru_cache(1024)
def read_cache(text: str) -> CacheOptions:
    options = CacheOptions(*ast.literal_eval(text))
    return options._replace(cache=Cache(*options.cache))


def cached(name: str, options: CacheOptions, names: tuple[str, ...], arrays: tuple) -> tuple:
    pass_, mask, scale, softcap, layout, len_q, len_k, len_new, cache, *rest, kernels, threads, limit = options
    text = spell((pass_, mask, None, None, layout, None, None, None, tuple(cache), *rest, kernels, 0, limit))
    numbers = scale, softcap, threads, len_q, len_k, len_new
    if name == "append":
        torch.ops.tessera.append(*arrays, text, *numbers)
        return (None,)
    if arrays[-1] is not None:
        raise NotImplementedError("out cannot be given while torch.compile traces; leave it out.")
    out, lse = torch.ops.tessera.decode(*arrays[:-1], text, *numbers)
    return Result(out, lse if options.lse else None, None)


def _cached(name: str, names: tuple[str, ...], arrays: tuple, text: str, numbers: tuple) -> tuple:
    scale, softcap, threads, len_q, len_k, len_new = numbers
    options = read_cache(text)._replace(
        scale=scale, softcap=softcap, threads=threads, max_len_q=len_q, max_len_k=len_k, max_len_new=len_new
    )
    made = cache_caller(options, names)(arrays, 0, 0, stream_of(arrays[0]))
    if tracing._open:
        tracing.record(f"{name} (compiled)", made[-1])
    return made


def _decode(*given: Any) -> tuple:
    arrays, text, numbers = given[:-7], given[-7], given[-6:]
    made = _cached("decode", NAMES_OF_DECODE, (*arrays, None), text, numbers)
    return made[0], arrays[0].new_empty(0) if made[1] is None else made[1]


def _decode_fake(*given: Any) -> tuple:
    arrays, options = given[:-7], read_cache(given[-7])
    q, v = arrays[0], arrays[NAMES_OF_DECODE.index("v")]
    packed = arrays[NAMES_OF_DECODE.index("cu_seqlens_q")] is not None
    form = Form(options.layout, packed, False, False, True, False)
    sizes = dict(zip(axes("q", form, 0), q.shape)) | {"v": v.shape[-1]}
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty([sizes[n] for n in axes("out", form, 0)], dtype=DTYPES[options.out_dtype] if options.out_dtype else q.dtype)
    lse = q.new_empty([sizes[n] for n in axes("lse", form, 0)] if options.lse else [0], dtype=exact)
    return out, lse


def _append(*given: Any) -> None:
    arrays, text, numbers = given[:-7], given[-7], given[-6:]
    _cached("append", STORED, arrays, text, numbers)


library.impl("decode", _decode, "CompositeExplicitAutograd")
library.impl("append", _append, "CompositeExplicitAutograd")
torch.library.register_fake("tessera::decode", _decode_fake, lib=library)
torch.library.register_fake("tessera::append", lambda *given: None, lib=library)


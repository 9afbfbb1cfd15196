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
RANDOM = "SymInt seed, SymInt offset"
library.define(
    f"attention({arguments(INPUTS, INPUTS[:3])}, str options, {BOUNDS}, {RANDOM}) -> (Tensor, Tensor, Tensor)"
)
library.define(
    f"attention_backward({arguments((*INPUTS, 'out', 'lse'), (*INPUTS[:3], 'out', 'lse'))}, Tensor? dout, Tensor? dlse, "
    f"bool[] wanted, str options, {BOUNDS}, {RANDOM}) -> Tensor[]"
)


# Places in a key; what is traced must be plain tuples for torch 2.4.
LEN_Q, LSE = Options._fields.index("max_len_q"), Options._fields.index("lse")
assert Options._fields[LEN_Q : LEN_Q + 2] == ("max_len_q", "max_len_k") and Options._fields[LSE + 1] == "max_score"
LEN_OF_CACHE = CacheOptions._fields.index("max_len_q")
assert CacheOptions._fields[LEN_OF_CACHE : LEN_OF_CACHE + 4] == ("max_len_q", "max_len_k", "max_len_new", "cache")


def spell(options: tuple) -> str:
    """As Python writes it, which the tracer of torch.compile can."""
    return repr(tuple(options))


@functools.lru_cache(1024)
def read(text: str) -> Options:
    return Options(*ast.literal_eval(text))


def with_bounds(text: str, max_len_q: int | None, max_len_k: int | None) -> Options:
    return read(text)._replace(max_len_q=max_len_q, max_len_k=max_len_k)


# -------------------------------------------------------------------------------------------------------- attention


def attention(key: tuple, seed: int, offset: int, arrays: tuple) -> Any:
    """(out, lse, plan) as the eager path, and max_score if asked for; the plan is None: it is made when the graph runs."""
    if arrays[-1] is not None:
        raise NotImplementedError("out cannot be given while torch.compile traces; leave it out.")
    text = spell((*key[:LEN_Q], None, None, *key[LEN_Q + 2 : LSE], True, *key[LSE + 1 :]))
    made = torch.ops.tessera.attention(*arrays[:-1], text, key[LEN_Q], key[LEN_Q + 1], seed, offset)
    lse = made[1] if key[LSE] else None
    return ResultWithMax(made[0], lse, None, made[2]) if key[LSE + 1] else Result(made[0], lse, None)


def _attention(*given: Any) -> tuple:
    arrays, (text, max_len_q, max_len_k, seed, offset) = given[: len(INPUTS)], given[len(INPUTS) :]
    options = with_bounds(text, max_len_q, max_len_k)
    made = forward_caller(options)((*arrays, None), seed, offset, stream_of(arrays[0]))
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
    saved, (dout, dlse, wanted, text, max_len_q, max_len_k, seed, offset) = given[:-8], given[-8:]
    made = backward(with_bounds(text, max_len_q, max_len_k), seed, offset, saved, dout, dlse, tuple(wanted))
    return [saved[0].new_empty(0) if grad is None else grad for grad in made]


def _attention_backward_fake(*given: Any) -> list:
    saved, wanted = given[:-8], given[-6]
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

CACHE_BOUNDS = f"{BOUNDS}, SymInt? max_len_new"
WRITTEN = ("k", "v", "status")
library.define(
    f"decode({arguments(NAMES_OF_DECODE[:-1], ('q', 'k', 'v'), WRITTEN)}, str options, {CACHE_BOUNDS}) -> (Tensor, Tensor)"
)
library.define(f"append({arguments(STORED, ('k', 'v', 'k_new'), WRITTEN)}, str options, {CACHE_BOUNDS}) -> ()")


@functools.lru_cache(1024)
def read_cache(text: str) -> CacheOptions:
    options = CacheOptions(*ast.literal_eval(text))
    return options._replace(cache=Cache(*options.cache))


def cached(name: str, options: CacheOptions, names: tuple[str, ...], arrays: tuple) -> tuple:
    n = LEN_OF_CACHE
    bounds = options[n : n + 3]
    text = spell((*options[:n], None, None, None, tuple(options.cache), *options[n + 4 :]))
    if name == "append":
        torch.ops.tessera.append(*arrays, text, *bounds)
        return (None,)
    if arrays[-1] is not None:
        raise NotImplementedError("out cannot be given while torch.compile traces; leave it out.")
    out, lse = torch.ops.tessera.decode(*arrays[:-1], text, *bounds)
    return Result(out, lse if options.lse else None, None)


def _cached(name: str, names: tuple[str, ...], arrays: tuple, text: str, bounds: tuple) -> tuple:
    options = read_cache(text)._replace(max_len_q=bounds[0], max_len_k=bounds[1], max_len_new=bounds[2])
    call = cache_caller(options, names)
    made = call(arrays, 0, 0, stream_of(arrays[0]))
    if tracing._open:
        tracing.record(f"{name} (compiled)", made[-1])
    return made


def _decode(*given: Any) -> tuple:
    arrays, (text, *bounds) = given[:-4], given[-4:]
    made = _cached("decode", NAMES_OF_DECODE, (*arrays, None), text, tuple(bounds))
    return made[0], arrays[0].new_empty(0) if made[1] is None else made[1]


def _decode_fake(*given: Any) -> tuple:
    arrays, options = given[:-4], read_cache(given[-4])
    q, v = arrays[0], arrays[NAMES_OF_DECODE.index("v")]
    packed = arrays[NAMES_OF_DECODE.index("cu_seqlens_q")] is not None
    form = Form(options.layout, packed, False, False, True, False)
    sizes = dict(zip(axes("q", form, 0), q.shape)) | {"v": v.shape[-1]}
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty([sizes[n] for n in axes("out", form, 0)], dtype=DTYPES[options.out_dtype] if options.out_dtype else q.dtype)
    lse = q.new_empty([sizes[n] for n in axes("lse", form, 0)] if options.lse else [0], dtype=exact)
    return out, lse


def _append(*given: Any) -> None:
    arrays, (text, *bounds) = given[:-4], given[-4:]
    _cached("append", STORED, arrays, text, tuple(bounds))


library.impl("decode", _decode, "CompositeExplicitAutograd")
library.impl("append", _append, "CompositeExplicitAutograd")
torch.library.register_fake("tessera::decode", _decode_fake, lib=library)
torch.library.register_fake("tessera::append", lambda *given: None, lib=library)


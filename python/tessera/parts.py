"""Partial results and masks: merge, dropout_mask."""

from __future__ import annotations

from typing import Any, Sequence

from . import _tessera
from .attention import Array
from .calls import bridge, check_one_library, empty, is_torch
from .problem import AXES


def orders(layout: str, packed: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where batch, sequence, head and dim lie in out and in lse; -1: nowhere."""
    out = ("" if packed else "b") + ("sHd" if layout == "bshd" else "Hsd")
    lse = "Hs" if packed else "bHs"
    place = [{AXES[letter][1]: at for at, letter in enumerate(letters)} for letters in (out, lse)]
    return tuple(place[0].get(d, -1) for d in range(4)), tuple(place[1].get(d, -1) for d in range(4))


def run_merge(outs: Sequence[Array], lses: Sequence[Array], layout: str, threads: int) -> tuple[Array, Array]:
    out, lse = _like(outs[0]), _like(lses[0])
    order = orders(layout, len(outs[0].shape) == 3)
    _tessera.merge(tuple(outs), tuple(lses), out, lse, None, None, None, None, *order, threads)
    return out, lse


def run_merge_backward(
    outs: Sequence[Array], lses: Sequence[Array], dout: Array, dlse: Array | None, layout: str, threads: int
) -> tuple[list[Array], list[Array]]:
    douts, dlses = [_strided_like(a) for a in outs], [_strided_like(a) for a in lses]
    order = orders(layout, len(outs[0].shape) == 3)
    _tessera.merge(tuple(outs), tuple(lses), None, None, dout, dlse, tuple(douts), tuple(dlses), *order, threads)
    return douts, dlses


def _like(array: Array) -> Array:
    dtype, _, _, shape, _, _, _ = _tessera.describe(array)
    if dtype < 0:
        raise ValueError(f"an array has dtype {array.dtype}; it must be a float that Tessera knows.")
    make, args, keywords = empty(array, _tessera.DTYPES[dtype], shape)
    return make(*args, **keywords)


def _strided_like(array: Any) -> Any:
    """Gradients lie as the parts do; a part that is spread out (expanded) cannot be written so."""
    if not is_torch(array):
        return _like(array)
    made = bridge().torch.empty_like(array)
    if made.stride() != array.stride():
        raise ValueError(f"a part has strides {tuple(array.stride())}, which overlap or have gaps; pass contiguous() of it.")
    return made


def merge(
    outs: Sequence[Array], lses: Sequence[Array], *, layout: str = "bshd", threads: int = 0
) -> tuple[Array, Array]:
    """Joins partial results over disjoint sets of keys, exactly: lse = log(sum exp(lse_n)), out = sum exp(lse_n - lse)
    out_n. Returns (out, lse). torch tensors that require gradients get them.

    outs: arrays (B, S, H, D) or packed (S, H, D) in `layout`, any float; lses: (B, H, S) or (H, S), float32 (float64 of
    float64). An empty part (out 0, lse -inf) changes nothing. All parts share one layout in memory.
    """
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(f"outs are {len(outs)} and lses {len(lses)}; give at least one part, each with both.")
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout is {layout!r}; it must be 'bshd' or 'bhsd'.")
    check_one_library({f"part {n}": a for n, a in enumerate([*outs, *lses])})
    if is_torch(outs[0]):
        return bridge().merge(tuple(outs), tuple(lses), layout, threads)
    return run_merge(outs, lses, layout, threads)


def dropout_mask(
    dropout: float, *, seed: int = 0, offset: int = 0, batch: int = 1, heads: int = 1, rows: int, keys: int
) -> Array:
    """The mask that dropout uses: a NumPy bool array (batch, heads, rows, keys), True keeps. A function of (seed, offset,
    batch, head, row, key) alone, the same on every engine, forward and backward.

    Source: Philox4x32-10, Salmon et al. 2011; the counter is in docs/contract.md, section 6.
    """
    import numpy

    grid = numpy.empty((batch, heads, rows, keys), dtype=bool)
    for b in range(batch):
        for h in range(heads):
            _tessera.dropout_mask(dropout, seed, offset, b, h, heads, rows, keys, grid[b, h])
    return grid



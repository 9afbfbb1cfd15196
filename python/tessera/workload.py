"""A problem line as something to run: random inputs, room for results, and what the line's mask and lengths mean.

The arrays are torch tensors on the CPU if torch is installed, else NumPy's (bf16 and e4m3 then need ml_dtypes).
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from . import _tessera
from .calls import bridge, numpy_dtype
from .problem import BACKWARD, BOTTOM_RIGHT, DTYPES, FORWARD, NAMES

try:
    import torch as torch_module
except ImportError:
    torch: Any = None
else:
    torch = torch_module

Array = Any  # a torch tensor or a NumPy array
Arrays = dict[str, Array]

RESULTS = (("out", "lse", "max_score"), ("dq", "dk", "dv", "dbias", "dslopes", "dsinks"), ())  # by pass
NORMAL = ("q", "k", "v", "k_new", "v_new", "bias", "sinks", "dout", "dlse")
TOP_LEFT, CORNER_AT = 2, 3
SIDES = {"q": "len_q", "k": "len_k", "new": "len_new"}
TRUE_SHARE = {"keep": 0.7, "exclude_keys": 0.2}
MOST_SAMPLED = 2e9  # the oracle takes about a second for 1e9 multiplications


class Operand(NamedTuple):
    """Extents and strides (elements) of (batch, sequence, head, dim); of bias and keep (batch, head, query, key)."""

    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]


class Rows(NamedTuple):
    """The rows of one sequence in an operand: `used` from (plane, first) on; those up to `stored` are unused."""

    plane: int
    first: int
    used: int
    stored: int


class Workload:
    """A line, its arrays, and the sequences in them.

    arrays: every operand by name, as the problem declares it: views of 4 dimensions. Bytes between strided elements and
    results that nobody wrote are NaN. The inputs are a function of (line, seed).
    """

    def __init__(self, line: str, seed: int = 0, threads: int = 0):
        self.problem = _tessera.Problem(line)
        self.problem.check()
        self.line = " ".join(line.split())  # problem.text() would lose its lists and seed
        self.operands = {n: Operand(_tessera.DTYPES[d], e, s) for n, (d, e, s) in self.problem.operands().items()}
        self._random = numpy.random.default_rng(seed)
        self._check_memory()
        if torch is not None:
            bridge()  # tells the extension torch's dtypes
        self.arrays: Arrays = {}
        for name in self.operands:
            self.arrays[name] = self.empty(name)
        self._lengths()
        self._values()
        if self.problem.pass_ == BACKWARD:
            self._forward(threads)

    # --------------------------------------------------------------------------------------------------- memory

    def _check_memory(self) -> None:
        total = sum(span(o) for o in self.operands.values())
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if total > machine:
            raise ValueError(f"the operands take {total} bytes; this machine has {machine}. Make the problem smaller.")

    def empty(self, name: str, inside: Arrays | None = None) -> Array:
        """New memory of the operand: all bytes 0xFF, which is NaN. With v_in_k v lies in `inside`'s k."""
        o = self.operands[name]
        if name == "v" and self.problem.v_in_k:
            return (self.arrays if inside is None else inside)["k"][..., : self.problem.dim_v]
        alignment = max(64, self.problem.alignment)
        memory = numpy.full(max(span(o), 16) + alignment, 255, numpy.uint8)
        memory = memory[-memory.ctypes.data % alignment :][: max(span(o), 16)]
        if torch is None:
            return strided(memory.view(numpy_dtype(o.dtype)), o)
        return strided(torch.from_numpy(memory).view(bridge().DTYPES[o.dtype]), o)

    def fresh(self) -> Arrays:
        """The arrays for one contender: inputs are shared; results, and a cache that grows, are its own."""
        mine = dict(self.arrays)
        for name in self.results:
            mine[name] = self.empty(name)
        if "k_new" in mine:
            for name in ("k", "v"):
                mine[name] = self.empty(name, mine)
                store(mine[name], self.arrays[name])
        if "status" in mine:
            mine["status"] = self.empty("status")
            store(mine["status"], numpy.zeros((1, 1, 1, 1)))
        return mine

    @property
    def results(self) -> tuple[str, ...]:
        """Names of what a run returns; a cache that grows is not among them."""
        return tuple(n for n in RESULTS[self.problem.pass_] if n in self.operands)

    def run(self, plan: _tessera.Plan, arrays: Arrays) -> None:
        plan.run(arrays, self.problem.seed, self.problem.offset)

    @property
    def sample_pairs(self) -> int:
        """How many (batch, KV head) pairs are judged; 0: all."""
        p = self.problem
        if any(n in self.operands for n in ("dbias", "dslopes", "dsinks")):
            return 0  # sums over all pairs
        return int(p.batch * p.heads_q * p.len_q * p.len_k * (p.dim + p.dim_v) > MOST_SAMPLED)

    def judge(self, arrays: Arrays) -> list[dict[str, Any]]:
        """Verdicts against the float64 oracle (docs/contract.md, 9), one a result."""
        return _tessera.verify(self.problem, arrays, self.problem.seed, self.problem.offset, self.sample_pairs)

    # -------------------------------------------------------------------------------------------------- lengths

    @property
    def is_cache(self) -> bool:
        p = self.problem
        named = ("k_new", "cache_lens", "cache_batch_idx", "left_pad")
        return bool(p.page_size or p.rows or p.slots or p.ring) or any(n in self.operands for n in named)

    @property
    def slots(self) -> int:
        return self.problem.slots or self.problem.len_k

    def said(self, name: str, otherwise: Any) -> None:
        """The line's numbers for a list of whole numbers, else `otherwise`."""
        if name not in self.operands:
            return
        values = numpy.asarray(self.problem.values(NAMES[name]) or otherwise, numpy.int32).reshape(-1)
        store(self.arrays[name], values.reshape(self.operands[name].extents))

    def listed(self, name: str, b: int, otherwise: int) -> int:
        """What a list says of sequence b; a list of one says it of all."""
        if name not in self.operands:
            return otherwise
        array = self.arrays[name]
        return int(array[min(b, array.shape[0] - 1), 0, 0, 0])

    def rows(self, side: str, b: int) -> Rows:
        """Of "q", "k" or "new"; keys of a cache lie in :meth:`places`."""
        length = getattr(self.problem, SIDES[side])
        if side == "k" and self.is_cache:
            full = self.listed("cache_lens", b, self.listed("seqused_k", b, self.problem.len_k))
            used = full - self.listed("left_pad", b, 0) + (self.rows("new", b).used if "k_new" in self.operands else 0)
            return Rows(b, 0, used, length)
        plane, first = b, 0
        if f"cu_seqlens_{side}" in self.operands:
            cu = self.arrays[f"cu_seqlens_{side}"]
            plane, first, length = 0, int(cu[b, 0, 0, 0]), int(cu[b + 1, 0, 0, 0] - cu[b, 0, 0, 0])
        return Rows(plane, first, self.listed(f"seqused_{side}", b, length), length)

    def _lengths(self) -> None:
        """Full ones where the line says none; packed sequences share the rows equally."""
        p = self.problem
        for side, length in SIDES.items():
            rows = {"q": p.rows_q, "k": p.rows_k, "new": p.rows_new}[side]
            share = min(getattr(p, length), rows // max(1, p.batch))
            self.said(f"cu_seqlens_{side}", [b * share for b in range(p.batch + 1)])
            if not (side == "k" and self.is_cache):
                stored = [self.rows(side, b).stored for b in range(p.batch)]
                self.said(f"seqused_{side}", stored)
        if self.is_cache:
            self._cache_lengths()

    def _cache_lengths(self) -> None:
        p = self.problem
        fresh = [self.rows("new", b).used if "k_new" in self.operands else 0 for b in range(p.batch)]
        spare = max(0, self.slots - max(fresh, default=0)) // 2
        self.said("left_pad", self._random.integers(0, min(8, spare) + 1, p.batch).tolist())
        self.said("cache_batch_idx", self._random.permutation(p.rows or p.batch)[: p.batch].tolist())
        pads = [self.listed("left_pad", b, 0) for b in range(p.batch)]
        lens = [pad + p.len_k - n for pad, n in zip(pads, fresh)]
        if not p.ring:
            lens = [min(full, self.slots - n) for full, n in zip(lens, fresh)]
        one = "cache_lens" in self.operands and self.operands["cache_lens"].extents[0] == 1
        self.said("cache_lens", [min(lens, default=0)] if one else lens)
        self.said("seqused_k", lens)
        if "page_table" in self.operands:
            self._page_table()

    def _page_table(self) -> None:
        """Pages of their own for each row of the cache, in random order; -1 where no sequence has slots."""
        p = self.problem
        table = numpy.full(self.operands["page_table"].extents, -1, numpy.int32)
        pages = self._random.permutation(p.pages).tolist()
        for b in range(p.batch):
            row, pad = self.listed("cache_batch_idx", b, b), self.listed("left_pad", b, 0)
            columns = -(-min(self.slots, pad + self.rows("k", b).used) // p.page_size)
            for column in range(columns):
                if table[row, column, 0, 0] < 0:
                    if not pages and not self.problem.values(NAMES["page_table"]):
                        raise ValueError(f"pages is {p.pages}, fewer than the sequences take. Say more.")
                    table[row, column, 0, 0] = pages.pop() if pages else -1
        self.said("page_table", table)

    # --------------------------------------------------------------------------------------------------- values

    def _values(self) -> None:
        for name, o in self.operands.items():
            if name in RESULTS[FORWARD] + RESULTS[BACKWARD]:
                continue
            if name == "v" and self.problem.v_in_k:
                continue
            shape = tuple(1 if s == 0 else e for e, s in zip(o.extents, o.strides))  # what shares memory has one value
            values = self._value(name, o, shape)
            if values is not None:
                store(self.arrays[name], values)

    def _value(self, name: str, o: Operand, shape: tuple[int, ...]) -> Any:
        random = self._random
        if name in NORMAL:
            return random.standard_normal(shape, numpy.float32) * (8 if o.dtype == "e4m3" else 1)
        if name in TRUE_SHARE:
            return random.random(shape, numpy.float32) < TRUE_SHARE[name]
        if name in ("k_scale", "v_scale"):
            return random.uniform(0.05, 0.2, shape)
        if name == "slopes":
            heads = numpy.arange(1, o.extents[2] + 1) / o.extents[2]
            return numpy.broadcast_to(numpy.exp2(-8 * heads)[:, None], o.extents)
        if name in ("cos", "sin"):
            share = numpy.arange(o.extents[3]) / max(1, o.extents[3])
            angles = numpy.arange(o.extents[1])[:, None, None] * 10000.0**-share
            return getattr(numpy, name)(angles)[None]
        if name in ("documents_q", "documents_k"):
            return self._documents(name[-1], o)
        if name == "corner_offsets":
            self.said(name, random.integers(0, self.problem.len_k + 1, o.extents[0]).tolist())
        if name == "status":
            return numpy.zeros(shape, numpy.int32)
        return None  # lengths, known already

    def _documents(self, side: str, o: Operand) -> Any:
        """Four documents in each sequence, of about equal length; rows that no sequence has belong to none."""
        ids = numpy.full(o.extents, -1, numpy.int32)
        for b in range(self.problem.batch):
            plane, first, used, _ = self.rows(side, b)
            ids[plane, first : first + used, 0, 0] = 4 * numpy.arange(used) // max(1, used)
        return ids

    def _forward(self, threads: int) -> None:
        """The out and lse that backward reads."""
        forward = _tessera.Problem(self.line)
        forward.pass_ = FORWARD
        forward.clear()
        for name, o in self.operands.items():
            if name not in (*RESULTS[BACKWARD], "dout", "dlse"):
                forward.declare(NAMES[name], DTYPES[o.dtype], o.extents, o.strides)
        self.run(_tessera.Plan(forward, "host", None, threads), self.arrays)

    # ------------------------------------------------------------------------------------------ what the line means

    def offset(self, b: int) -> int:
        """Query row i of sequence b stands at position i + offset."""
        corner = self.problem.corner
        if corner == BOTTOM_RIGHT:
            return self.rows("k", b).used - self.rows("q", b).used
        return self.listed("corner_offsets", b, self.problem.corner_at) if corner == CORNER_AT else 0

    def kept(self, b: int) -> Any:
        """The mask of sequence b by the contract's formulas: NumPy bool (1 or Hq, used queries, used keys)."""
        p, (q, k) = self.problem, (self.rows("q", b), self.rows("k", b))
        i = numpy.arange(q.used)[:, None] + self.offset(b)
        j = numpy.arange(k.used)[None]
        kept = numpy.ones((1, q.used, k.used), bool)
        if p.has_prefix:
            kept &= (j < p.prefix) | (j <= i)
        elif p.causal:
            kept &= j <= i
        if p.has_window:
            far = 1 << 60  # bounds may be any int64
            left = True if p.window_left_unbounded else j >= i - min(max(p.window_left, -far), far)
            right = True if p.window_right_unbounded else j <= i + min(max(p.window_right, -far), far)
            kept &= (left & right) | (j < p.first)
        if p.chunk:
            kept &= j // p.chunk == i // p.chunk
        if "exclude_keys" in self.operands:
            kept &= ~host(self.arrays["exclude_keys"])[b, : k.used, 0, 0]
        if "documents_q" in self.operands:
            mine = host(self.arrays["documents_q"])[q.plane, q.first : q.first + q.used, :1, 0]
            its = host(self.arrays["documents_k"])[k.plane, k.first : k.first + k.used, 0, 0]
            kept &= (mine == its) & (mine >= 0)
        if "keep" in self.operands:
            kept = kept & grid(host(self.arrays["keep"]), b, q.used, k.used)
        return kept

    def places(self, b: int) -> tuple[Any, Any]:
        """Where keys 0, 1, ... of sequence b lie in k and v: (plane, row), int arrays."""
        k = self.rows("k", b)
        if not self.is_cache:
            return numpy.full(k.used, k.plane), k.first + numpy.arange(k.used)
        p, row = self.problem, self.listed("cache_batch_idx", b, b)
        slot = self.listed("left_pad", b, 0) + numpy.arange(k.used)
        if p.ring:
            slot %= self.slots
        if not p.page_size:
            return numpy.full(k.used, row), slot
        return host(self.arrays["page_table"])[row, slot // p.page_size, 0, 0], slot % p.page_size

    def unused(self, side: str) -> Any:
        """Rows of q, or of k and v, that nobody reads: bool (planes, rows)."""
        unused = numpy.ones(self.operands[side].extents[:2], bool)
        for b in range(self.problem.batch):
            if side == "q":
                rows = self.rows("q", b)
                unused[rows.plane, rows.first : rows.first + rows.used] = False
                continue
            planes, rows = self.places(b)
            if "exclude_keys" in self.operands:
                seen = ~host(self.arrays["exclude_keys"])[b, : len(rows), 0, 0]
                planes, rows = planes[seen], rows[seen]
            unused[planes, rows] = False
        return unused


def grid(array: Array, b: int, rows: int, keys: int) -> Array:
    """Sequence b of a bias or keep: (1 or Hq, 1 or rows, 1 or keys)."""
    one = array[min(b, array.shape[0] - 1)]
    return one[:, : rows if one.shape[1] > 1 else 1, : keys if one.shape[2] > 1 else 1]


def span(o: Operand) -> int:
    """Bytes from the first element to the last."""
    if 0 in o.extents:
        return 0
    return (1 + sum((e - 1) * s for e, s in zip(o.extents, o.strides))) * ITEM_BYTES[o.dtype]


ITEM_BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "i32": 4, "bool": 1, "e4m3": 1}


def strided(flat: Array, o: Operand) -> Array:
    if torch is not None:
        return flat.as_strided(o.extents, o.strides)
    return numpy.lib.stride_tricks.as_strided(flat, o.extents, [s * flat.itemsize for s in o.strides])


def store(view: Array, values: Any) -> None:
    """Writes values that broadcast to `view`, each memory place once."""
    steps = view.stride() if torch is not None else view.strides
    view = view[tuple(slice(0, 1) if s == 0 and n > 1 else slice(None) for n, s in zip(view.shape, steps))]
    if torch is None:
        view[...] = values
    else:
        view.copy_(torch.from_numpy(numpy.require(values, None, ["C", "W"])) if isinstance(values, numpy.ndarray) else values)


def host(array: Array) -> Any:
    return array if isinstance(array, numpy.ndarray) else array.numpy()


def bits(array: Array) -> bytes:
    """What it holds, in the order of its indices."""
    if torch is None:
        return numpy.ascontiguousarray(array).tobytes()
    return array.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes()


def read_lines(sources: list[str]) -> list[str]:
    """Problem lines, where a source is a line or a file of them."""
    lines: list[str] = []
    for source in sources:
        if not os.path.isfile(source):
            lines.append(source)
            continue
        stripped = (line.split("#")[0].strip() for line in Path(source).read_text().splitlines())
        lines += [line for line in stripped if line]
    if not lines:
        raise ValueError('no problem line was given; give one, such as "forward f32 h8 q512 k512 d64 mask=causal".')
    return lines


def quantile(times: list[float], share: float) -> float:
    ordered = sorted(times)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

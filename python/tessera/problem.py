"""From arrays and options to a Problem: which axis of an array is what, sizes, and whether they agree.

The spelling of masks and options is that of problem lines; the library's own parser reads them (ADDING.md).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from . import _tessera

NAMES = {name: n for n, name in enumerate(_tessera.NAMES)}
DTYPES = {name: n for n, name in enumerate(_tessera.DTYPES)}
LAYOUTS = ("bshd", "bhsd")
FORWARD, BACKWARD, APPEND = range(3)
CORNER_UNSET, BOTTOM_RIGHT = range(2)
CPU, CUDA = 1, 2  # DLPack's numbers

# An axis by a letter, how it is called in messages, and its place among (batch, sequence, head, dim).
AXES = {
    "b": ("batch", 0),
    "s": ("seq_q", 1),
    "k": ("seq_k", 1),
    "n": ("seq_new", 1),
    "H": ("heads_q", 2),
    "h": ("heads_kv", 2),
    "d": ("dim", 3),
    "v": ("dim_v", 3),
    "1": ("batch + 1", 0),
    "r": ("cache rows", 0),
    "t": ("slots", 1),
    "P": ("pages", 0),
    "p": ("page size", 1),
    "c": ("columns", 1),
    "a": ("positions", 1),
    "z": ("rotary / 2", 3),
    "S": ("max_len_q", 2),  # of a grid (batch, head, query, key)
    "K": ("max_len_k", 3),
    "G": ("heads_q", 1),
}
BROADCASTS = {"bias", "keep", "slopes", "cache_lens", "k_scale", "v_scale", "dbias", "dslopes"}


class Array(NamedTuple):
    """What _tessera.describe tells of an array."""

    dtype: int
    device: int
    device_id: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    read_only: bool
    alignment: int


class Form(NamedTuple):
    """What decides which axis of an array is what."""

    layout: str
    packed_q: bool
    packed_k: bool
    packed_new: bool
    cache: bool
    paged: bool


def tokens(form: Form, seq: str, head: str, last: str, packed: bool) -> str:
    rows = seq + head if form.layout == "bshd" else head + seq
    return ("" if packed else "b") + rows + last


def axes(name: str, form: Form, rank: int) -> str:
    """The axes of operand `name` in the caller's order, a letter each."""
    if name in ("q", "dq"):
        return tokens(form, "s", "H", "d", form.packed_q)
    if name in ("out", "dout"):
        return tokens(form, "s", "H", "v", form.packed_q)
    if name in ("k", "v", "dk", "dv"):
        last = "d" if name in ("k", "dk") else "v"
        if not form.cache:
            return tokens(form, "k", "h", last, form.packed_k)
        rows = "p" if form.paged else "t"
        return ("P" if form.paged else "r") + (rows + "h" if form.layout == "bshd" else "h" + rows) + last
    if name in ("k_new", "v_new"):
        return tokens(form, "n", "h", "d" if name == "k_new" else "v", form.packed_new)
    if name in ("lse", "max_score", "dlse"):
        return "Hs" if form.packed_q else "bHs"
    if name in ("bias", "keep", "dbias"):
        return "bGSK"
    if name == "exclude_keys":
        return "bk"
    if name == "documents_q":
        return "s" if form.packed_q else "bs"
    if name == "documents_k":
        return "k" if form.packed_k else "bk"
    if name in ("slopes", "dslopes"):
        return "H" if rank == 1 else "bH"
    if name in ("sinks", "dsinks"):
        return "H"
    if name.startswith("cu_seqlens"):
        return "1"
    if name == "page_table":
        return "rc"
    if name in ("cos", "sin"):
        return "az"
    if name in ("k_scale", "v_scale"):
        return {1: "h", 2: "Pp" if form.paged else "rt"}.get(rank, "Pph" if form.paged else "rth")
    return "b"  # lengths and offsets of sequences, and status


def refuse(name: str, shape: tuple[int, ...], letters: str, rule: str) -> ValueError:
    words = ", ".join(AXES[letter][0] for letter in letters)
    comma = "," if len(letters) == 1 else ""
    return ValueError(f"{name} has shape {tuple(shape)}; it must be ({words}{comma}){rule}")


class Sizes:
    """Sizes by letter, each with the array that fixed it. `arguments`: how the caller knows an operand, if otherwise."""

    def __init__(self, arguments: dict[str, str]) -> None:
        self.of: dict[str, int] = {}
        self.by: dict[str, str] = {}
        self.arguments = arguments

    def take(self, name: str, shape: tuple[int, ...], letters: str) -> None:
        broadcasts = name in BROADCASTS
        name = self.arguments.get(name, name)
        if len(shape) != len(letters):
            raise refuse(name, shape, letters, ".")
        for letter, n in zip(letters, shape):
            known = self.of.setdefault(letter, n)
            by = self.by.setdefault(letter, name)
            if known != n and not (n == 1 and broadcasts):
                says = "" if by == name else f", as {by} says"
                raise refuse(name, shape, letters, f" with {AXES[letter][0]} = {known}{says}.")

    def fix(self, letter: str, n: int, by: str) -> None:
        self.of[letter] = n
        self.by[letter] = by

    def __getitem__(self, letter: str) -> int:
        return self.of.get(letter, 0)


def check_arrays(
    arrays: dict[str, Any], described: dict[str, Array], written: tuple[str, ...], arguments: dict[str, str]
) -> None:
    """Dtypes that the library knows, one device, and memory that may be written."""
    operand = next(iter(described))
    home = described[operand]
    first = arguments.get(operand, operand)
    for operand, a in described.items():
        name = arguments.get(operand, operand)
        if a.dtype < 0:
            known = ", ".join(text for text in DTYPES if text != "absent")
            raise ValueError(f"{name} has dtype {getattr(arrays[operand], 'dtype', '?')}; Tessera knows {known}. Convert it.")
        if (a.device, a.device_id) != (home.device, home.device_id):
            raise ValueError(
                f"{name} is on {device_text(a)} and {first} on {device_text(home)}; all arrays of a call are on one "
                f"device. Move {name}."
            )
        if a.read_only and operand in written:
            raise ValueError(f"{name} is read-only and this call writes it; pass a writable array.")
    if home.device not in (CPU, CUDA):
        raise NotImplementedError(f"{first} is on {device_text(home)}; Tessera runs on the CPU and on CUDA devices.")


def device_text(a: Array) -> str:
    return "cpu" if a.device == CPU else f"cuda:{a.device_id}" if a.device == CUDA else f"device type {a.device}"


def device_of(a: Array) -> str:
    """The device that the library is asked for."""
    return "host" if a.device == CPU else device_text(a)


def place(problem: _tessera.Problem, name: str, dtype: int, letters: str, shape: Any, strides: Any) -> None:
    """Declares an array whose axes are `letters`."""
    at = {AXES[letter][1]: (n, step) for letter, n, step in zip(letters, shape, strides)}
    extent = [at.get(d, (1, 0))[0] for d in range(4)]
    # An axis that the array does not have steps over all that is inside it, as in a dense one; so lines stay short.
    stride = [at[d][1] if d in at else math.prod(extent[d + 1 :]) for d in range(4)]
    problem.declare(NAMES[name], dtype, tuple(extent), tuple(stride))


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


class Wish(NamedTuple):
    """A result to be made: its name and dtype."""

    name: str
    dtype: int


class Bounds(NamedTuple):
    """Upper bounds that the caller gives for lengths; None: as the arrays allow."""

    len_q: int | None = None
    len_k: int | None = None
    len_new: int | None = None


class Cache(NamedTuple):
    ring: bool = False
    v_in_k: bool = False
    rotary_interleaved: bool = False


def build(
    pass_: int,
    words: str,
    form: Form,
    arrays: dict[str, Any],
    described: dict[str, Array],
    wishes: tuple[Wish, ...],
    bounds: Bounds = Bounds(),
    cache: Cache = Cache(),
    written: tuple[str, ...] = (),
) -> tuple[_tessera.Problem, dict[str, tuple[int, ...]]]:
    """The problem of these arrays, and the shapes of the results that are to be made."""
    arguments = {"k": "k_cache", "v": "v_cache"} if form.cache else {}
    check_arrays(arrays, described, written, arguments)
    sizes = Sizes(arguments)
    if form.cache:
        _cache_sizes(sizes, form, described)
    for name in ("q", "k_new", "k", "v", "v_new"):
        if name in described:
            sizes.take(name, described[name].shape, axes(name, form, len(described[name].shape)))
    _lengths(sizes, form, described, bounds)

    problem = _tessera.Problem(f"forward d1 {words}")
    problem.clear()
    if problem.corner == CORNER_UNSET and ("slopes" in described or "cos" in described):
        problem.corner = BOTTOM_RIGHT  # Python's default, as that of lines
    problem.pass_ = pass_
    # Lists of lengths need no more than their own four bytes.
    problem.alignment = min(a.alignment for a in described.values() if a.dtype not in (DTYPES["i32"], DTYPES["bool"]))
    problem.batch, problem.dim, problem.dim_v = sizes["b"], sizes["d"], sizes["v"]
    problem.heads_kv = sizes["h"]
    problem.heads_q = sizes["H"] if pass_ != APPEND else sizes["h"]
    problem.len_q, problem.len_k, problem.len_new = sizes["S"], sizes["K"], sizes["N"]
    problem.rows_q = sizes["s"] if form.packed_q else 0
    problem.rows_k = sizes["k"] if form.packed_k and not form.cache else 0
    problem.rows_new = sizes["n"] if form.packed_new else 0
    if form.cache:
        _declare_cache(problem, sizes, form, described, cache)

    sizes.of.setdefault("G", sizes["H"])
    sizes.by.setdefault("G", "q")
    inside = sizes.of | {"k": sizes["K"]}  # exclude_keys counts inside a sequence, packed or not
    for name, a in described.items():
        letters = axes(name, form, len(a.shape))
        if name == "exclude_keys":
            within = Sizes(arguments)
            within.of, within.by = inside, sizes.by
            within.take(name, a.shape, letters)
        elif name == "status":
            if a.shape not in ((1,), ()):
                raise ValueError(f"status has shape {a.shape}; it must be one int32, (1,).")
            letters = "b"[: len(a.shape)]
        else:
            sizes.take(name, a.shape, letters)
        place(problem, name, a.dtype, letters, a.shape, a.strides)
    shapes = {}
    for name, dtype in wishes:
        partner = described.get(name[1:]) if name[0] == "d" else None
        letters = axes(name, form, len(partner.shape) if partner else 0)
        shape = partner.shape if partner else tuple(sizes[letter] for letter in letters)
        place(problem, name, dtype, letters, shape, dense_strides(shape))
        shapes[name] = shape
    return problem, shapes


def _lengths(sizes: Sizes, form: Form, described: dict[str, Array], bounds: Bounds) -> None:
    """The batch of packed arrays, and S, K, N: the upper bounds of a sequence's lengths."""
    for side, packed in (("q", form.packed_q), ("k", form.packed_k), ("new", form.packed_new)):
        if packed:
            name = f"cu_seqlens_{side}"
            shape = described[name].shape
            if len(shape) != 1 or shape[0] < 1:
                raise refuse(name, shape, "1", ".")
            if sizes.of.setdefault("b", shape[0] - 1) != shape[0] - 1:
                raise refuse(name, shape, "1", f" with batch = {sizes['b']}, as {sizes.by['b']} says.")
            sizes.by.setdefault("b", name)
    sizes.fix("1", sizes["b"] + 1, sizes.by.get("b", "q"))
    for letter, rows, packed, bound in (
        ("S", "s", form.packed_q, bounds.len_q),
        ("K", "k", form.packed_k or form.cache, bounds.len_k),
        ("N", "n", form.packed_new, bounds.len_new),
    ):
        argument = {"S": "max_len_q", "K": "max_len_k", "N": "max_len_new"}[letter]
        if bound is None:
            sizes.fix(letter, sizes["K_"] if letter == "K" and form.cache else sizes[rows], argument)
        elif not packed:
            raise ValueError(f"{argument} is {bound}, but its arrays are not packed; their shape says it. Leave it out.")
        else:
            sizes.fix(letter, bound, argument)


def _cache_sizes(sizes: Sizes, form: Form, described: dict[str, Array]) -> None:
    """Rows and slots of a cache; "K_" is the most keys that a sequence can have."""
    k = described["k"].shape
    if len(k) != 4:
        raise refuse("k_cache", k, axes("k", form, 4), ".")
    rows_at = 1 if form.layout == "bshd" else 2
    if form.paged:
        table = described["page_table"].shape
        if len(table) != 2:
            raise refuse("page_table", table, "rc", ".")
        sizes.fix("r", table[0], "page_table")
        sizes.fix("c", table[1], "page_table")
        sizes.fix("K_", table[1] * k[rows_at], "page_table")
    else:
        sizes.fix("K_", k[rows_at], "k_cache")


def _declare_cache(
    problem: _tessera.Problem, sizes: Sizes, form: Form, described: dict[str, Array], cache: Cache
) -> None:
    for letter, name in (("b", "cache_batch_idx"), ("b", "cache_lens")):
        if name in described and letter not in sizes.of:
            sizes.take(name, described[name].shape, letter)
    if form.paged:
        problem.page_size, problem.pages = sizes["p"], sizes["P"]
    problem.rows = sizes["r"]
    problem.slots = sizes["K_"]
    problem.ring = int(cache.ring)
    problem.v_in_k = int(cache.v_in_k)
    if "cos" in described:
        sizes.take("cos", described["cos"].shape, "az")
        problem.rotary_dim = 2 * sizes["z"]
        problem.rotary_positions = sizes["a"]
        problem.rotary_interleaved = int(cache.rotary_interleaved)

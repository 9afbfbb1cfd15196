"""Attention from KV caches: append, decode, and prefixes that several requests share."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _tessera, tracing
from .attention import Array
from .calls import Result, accumulation, bridge, caller_of, callers, check_options, empty, form_of, is_torch
from .calls import check_one_library, check_out, explain, mask_of, need, words
from .mask import ARRAYS, NO_ARRAYS, Mask
from .problem import APPEND, DTYPES, FORWARD, Bounds, Cache, Wish, build, device_of
from .problem import Array as Description

ATTENDED = ("q", "bias", "slopes", "sinks", *ARRAYS, "cu_seqlens_q", "seqused_q", "seqused_k")
STORED = (
    "k", "v", "k_new", "v_new", "cu_seqlens_new", "seqused_new", "cache_lens", "cache_batch_idx", "left_pad",
    "page_table", "cos", "sin", "k_scale", "v_scale", "status",
)  # fmt: skip


class CacheOptions(NamedTuple):
    """What a decode or append call depends on besides its arrays. Hashable."""

    pass_: int
    mask: str = "none"
    scale: float | None = None
    softcap: float | None = None
    layout: str = "bshd"
    max_len_q: int | None = None
    max_len_k: int | None = None
    max_len_new: int | None = None
    cache: Cache = Cache()
    out_dtype: str | None = None
    lse: bool = False
    batch_invariant: bool = False
    kernels: str | None = None
    threads: int = 0
    workspace_limit: int | None = None


def cache_problem(options: CacheOptions, given: dict[str, Any], described: dict[str, Description]) -> tuple:
    attends = options.pass_ == FORWARD
    need(described, *(("q", "k", "v") if attends else ("k", "v", "k_new")))
    if attends and "cache_lens" not in described and "seqused_k" not in described and "k_new" in described:
        raise ValueError("cache_lens is None; with k_new it must say how many slots each sequence has in use.")
    form = form_of(options.layout, described, cache=True)
    wishes: list[Any] = []
    if attends:
        q = described["q"].dtype
        wishes = [Wish("out", DTYPES[options.out_dtype] if options.out_dtype else q)]
        check_out(options, described)
        if "out" in described:
            wishes = [NAMES_OF_DECODE.index("out")]
        wishes.append(Wish("lse", accumulation(q)) if options.lse else None)
    bounds = Bounds(options.max_len_q, options.max_len_k, options.max_len_new)
    made = tuple(w for w in wishes if isinstance(w, Wish))
    problem, shapes = build(
        options.pass_, words(options), form, given, described, made, bounds, options.cache, written(given)
    )
    return problem, shapes, (*wishes, ...)


NAMES_OF_DECODE = (*ATTENDED, *STORED, "out")


def cache_caller(options: CacheOptions, names: tuple[str, ...]) -> Any:
    """Its calls return a Result, of an append the plan alone, in a tuple."""
    result = Result if options.pass_ == FORWARD else tuple
    return callers.get(options) or caller_of(options, names, cache_problem, options, result)


def written(given: dict[str, Any]) -> tuple[str, ...]:
    """The operands of a call that it writes: a cache only if new tokens come."""
    return (*(("k", "v") if given.get("k_new") is not None else ()), "status", "out")


def _no_gradients(name: str, arrays: Any) -> None:
    torch = bridge()
    if torch.grad_enabled() and any([a is not None and a.requires_grad for a in arrays]):
        raise ValueError(f"an array requires gradients, and {name} has none. Call it under torch.no_grad().")
    torch.refuse_tangents(arrays)


def _call(name: str, options: CacheOptions, names: tuple[str, ...], arrays: tuple) -> Any:
    stream = None
    torch = bridge() if is_torch(arrays[0]) else None
    try:
        if torch:
            _no_gradients(name, arrays)
            if torch.must_dispatch(arrays[0]):
                return torch.ops().cached(name, options, names, arrays)
            stream = torch.stream_of(arrays[0])
        made = cache_caller(options, names)(arrays, 0, 0, stream)
    except (TypeError, AttributeError) as error:
        explain(error, options, {n: a for n, a in zip(names, arrays) if a is not None})
    if torch:
        given = dict(zip(names, arrays))
        torch.written(given.get(n) for n in written(given))
    if tracing._open:
        tracing.record(name, made[-1])
    return made


def decode(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    cache_lens: Array | None = None,
    k_new: Array | None = None,
    v_new: Array | None = None,
    page_table: Array | None = None,
    cache_batch_idx: Array | None = None,
    left_pad: Array | None = None,
    cos: Array | None = None,
    sin: Array | None = None,
    rotary_interleaved: bool = False,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    v_in_k: bool = False,
    ring: bool = False,
    mask: Mask | str | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Array | None = None,
    slopes: Array | None = None,
    sinks: Array | None = None,
    layout: str = "bshd",
    cu_seqlens_q: Array | None = None,
    cu_seqlens_new: Array | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    seqused_new: Array | None = None,
    max_len_q: int | None = None,
    max_len_k: int | None = None,
    max_len_new: int | None = None,
    status: Array | None = None,
    out: Array | None = None,
    out_dtype: str | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    kernels: str | None = None,
    threads: int = 0,
    workspace_limit: int | None = None,
) -> Result:
    """Attends keys that lie in a cache; appends k_new and v_new to it first if they are given. No gradients.

    * k_cache, v_cache: (rows, slots, Hkv, D) and (.., Dv), or with page_table pools (pages, page size, Hkv, D) of any
      page size; layout "bhsd" has heads before slots. Dtype as q, or float8_e4m3fn with k_scale and v_scale.
    * cache_lens: int32 (B,) or (1,), slots in use before the append, left padding included. k_new, v_new:
      (B, Sn, Hkv, D), written to the next slots, k_new rotated first if cos and sin are given; with cu_seqlens_new packed.
    * page_table: int32 (rows, columns): slot t of row r lies on page page_table[r, t // page size].
    * cache_batch_idx: int32 (B,), the row of each sequence. left_pad: int32 (B,), slots before its first key.
    * cos, sin: (positions, rotary / 2): q and k_new are rotated at their positions; halves, or with rotary_interleaved
      neighbours, are rotated together.
    * k_scale, v_scale: (1,), (Hkv,), (rows, slots) or (rows, slots, Hkv): k = k_scale * stored number.
    * v_in_k: v_cache is a view of the first Dv numbers of k_cache's rows (MLA). ring: slot t lies in t % slots; needs a
      window that never looks back further.
    * status: int32 (1,): what was unsound in lengths or pages is noted there too.

    q, mask and the rest as in :func:`attention`. Unsound lengths or page ids raise ValueError before anything is written.

    Source: PagedAttention, Kwon et al. 2023, arXiv:2309.06180; FlashDecoding, Dao et al. 2023.
    """
    m = None if mask is None else mask_of(mask)
    masks = NO_ARRAYS if m is None else m.in_order
    options = CacheOptions(
        FORWARD,
        "none" if m is None else m._text,
        scale,
        softcap,
        layout,
        max_len_q,
        max_len_k,
        max_len_new,
        Cache(ring, v_in_k, rotary_interleaved),
        out_dtype,
        return_lse,
        batch_invariant,
        kernels,
        threads,
        workspace_limit,
    )
    attended = (q, bias, slopes, sinks, *masks, cu_seqlens_q, seqused_q, seqused_k)
    stored = (k_cache, v_cache, k_new, v_new, cu_seqlens_new, seqused_new, cache_lens, cache_batch_idx, left_pad)
    rest = (page_table, cos, sin, k_scale, v_scale, status)
    return _call("decode", options, NAMES_OF_DECODE, (*attended, *stored, *rest, out))


def append(
    k_cache: Array,
    v_cache: Array,
    k_new: Array,
    v_new: Array | None,
    *,
    cache_lens: Array | None = None,
    page_table: Array | None = None,
    cache_batch_idx: Array | None = None,
    left_pad: Array | None = None,
    cos: Array | None = None,
    sin: Array | None = None,
    rotary_interleaved: bool = False,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    v_in_k: bool = False,
    ring: bool = False,
    layout: str = "bshd",
    cu_seqlens_new: Array | None = None,
    seqused_new: Array | None = None,
    max_len_new: int | None = None,
    status: Array | None = None,
    kernels: str | None = None,
    threads: int = 0,
) -> _tessera.Plan:
    """Writes k_new and v_new into the cache, k_new rotated if cos and sin are given, and attends nothing. Arrays as in
    :func:`decode`; v_new is None with v_in_k. Writes the slots of the new tokens and nothing else; raises ValueError
    before anything is written if a length or a page id is unsound. Returns the plan."""
    options = CacheOptions(
        APPEND,
        layout=layout,
        max_len_new=max_len_new,
        cache=Cache(ring, v_in_k, rotary_interleaved),
        kernels=kernels,
        threads=threads,
    )
    stored = (k_cache, v_cache, k_new, v_new, cu_seqlens_new, seqused_new, cache_lens, cache_batch_idx, left_pad)
    return _call("append", options, STORED, (*stored, page_table, cos, sin, k_scale, v_scale, status))[-1]


class Level:
    """One level of :func:`cascade`: keys, and the options of :func:`attention` or :func:`decode` that belong to them.

    k, v: (B, Sk, Hkv, D), packed with cu_seqlens_k, or a cache with cache_lens or page_table. cu_seqlens_q: int32, which
    query rows read which sequence of this level; None: all rows read the one there is.
    """

    def __init__(self, k: Array, v: Array, *, mask: Mask | str | None = None, **arrays: Array):
        names = {*ATTENDED, *STORED} - {"q", "k", "v", *ARRAYS}
        unknown = arrays.keys() - names
        if unknown:
            raise ValueError(f"{unknown.pop()} is no array of a level; they are {', '.join(sorted(names))}.")
        m = None if mask is None else mask_of(mask)
        self.mask = "none" if m is None else m.text
        self.arrays = {"k": k, "v": v, **arrays, **(m.arrays if m else {})}
        self.arrays = {name: a for name, a in self.arrays.items() if a is not None}


def cascade(
    q: Array,
    levels: list[Level],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    out_dtype: str | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    kernels: str | None = None,
    threads: int = 0,
) -> Result:
    """Attends prefixes that several requests share once for all of them: a row's result is that of all its levels' keys
    together, merged exactly. No gradients.

    q: packed, (rows, Hq, D). levels: from the widest prefix to the requests themselves; only the last may append, and
    levels whose sequences hold several requests take no mask that depends on positions.

    >>> tessera.cascade(q, [Level(k_prefix, v_prefix), Level(k, v, cu_seqlens_q=cu, page_table=table,
    ...                     cache_lens=lens, mask="causal")])             # doctest: +SKIP
    """
    if not isinstance(levels, (list, tuple)) or not all(isinstance(level, Level) for level in levels):
        raise ValueError("levels must be a list of tessera.Level.")
    options_of_all = CacheOptions(
        FORWARD, "none", scale, softcap, out_dtype=out_dtype, lse=return_lse, batch_invariant=batch_invariant,
        kernels=kernels, threads=threads,
    )  # fmt: skip
    check_options(options_of_all)
    all_arrays = {"q": q}
    for n, level in enumerate(levels):
        all_arrays |= {f"{name} of level {n}": a for name, a in level.arrays.items()}
    check_one_library(all_arrays)
    if is_torch(q):
        _no_gradients("cascade", all_arrays.values())
    problems, bound = [], []
    like_q = Description(*_tessera.describe(q))
    wishes: tuple[Wish, ...] = (Wish("out", DTYPES[out_dtype] if out_dtype else like_q.dtype),)
    if return_lse:
        wishes += (Wish("lse", accumulation(like_q.dtype)),)
    shapes: dict[str, tuple[int, ...]] = {}
    for level in levels:
        given = {"q": q, **level.arrays}
        if "cu_seqlens_q" not in given:
            given["cu_seqlens_q"] = _row_ends(q, like_q.shape[0])
        described = {name: Description(*_tessera.describe(a)) for name, a in given.items()}
        cached = bool(given.keys() & {"cache_lens", "page_table", "cache_batch_idx", "left_pad", "k_new"})
        options = options_of_all._replace(mask=level.mask)
        problem, made = build(
            FORWARD, words(options), form_of("bshd", described, cached), given, described,
            wishes, written=written(given),
        )  # fmt: skip
        shapes |= made
        problems.append(problem)
        bound.append(given)
    plan = _tessera.Plan(tuple(problems), device_of(like_q), kernels, threads)
    results = {}
    for wish in wishes:
        make, args, keywords = empty(q, _tessera.DTYPES[wish.dtype], shapes[wish.name])
        results[wish.name] = make(*args, **keywords)
    bound[-1] = {**bound[-1], **results}
    plan.run(tuple(bound))
    if is_torch(q):
        bridge().written(given.get(n) for given in bound for n in written(given) if n != "out")
    if tracing._open:
        tracing.record("cascade", plan)
    return Result(results["out"], results.get("lse"), plan)


def _row_ends(q: Array, rows: int) -> Array:
    make, args, keywords = empty(q, "i32", (2,))
    ends = make(*args, **keywords)
    ends[0], ends[1] = 0, rows
    return ends



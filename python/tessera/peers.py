"""What else answers a problem line: torch's SDPA, the materialised computation, flash_attn. Each is asked for what the
line means, or says in words why it cannot be.
"""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple

from . import _tessera
from .problem import BACKWARD, BOTTOM_RIGHT
from .workload import Array, Arrays, Rows, Workload, grid, torch

ELEMENTS = ("keep", "exclude_keys", "documents_q")  # masks that are arrays


class Cannot(Exception):
    """Why a contender cannot answer the line, in words."""


class Settings(NamedTuple):
    threads: int = 0
    kernels: str | None = None


class Call(NamedTuple):
    """A contender at work: what is timed, where its return value's results go, and a word on how it is asked."""

    run: Callable[[], Any]
    results: Callable[[Any], Arrays]
    """Everything that verify needs, results included, in the line's own layout."""
    names: tuple[str, ...]
    """The results that it computes, which are judged."""
    how: str
    given_bytes: int = 0
    """Of results that it is given room for; the others allocate theirs."""


def tessera_contender(w: Workload, s: Settings) -> Call:
    plan = _tessera.Plan(w.problem, "host", s.kernels, s.threads)
    mine = w.fresh()
    names = w.results + (("k", "v") if "k_new" in mine else ())
    given = sum(mine[n].nbytes for n in w.results)
    return Call(lambda: w.run(plan, mine), lambda _: mine, names, plan.kernel, given)


# -------------------------------------------------------------------------------------------------------- torch peers


class Part(NamedTuple):
    """One call of a peer: the whole batch if its sequences are alike, else one sequence. Arrays are (B, H, S, D), kept
    and bias broadcast to (B, Hq, Sq, Sk)."""

    b: int | None
    q: Array
    k: Array
    v: Array
    kept: Array | None
    distance: Array | None  # |p - j|
    bias: Array | None
    slopes: Array | None  # (B, Hq, 1, 1)
    at_corner: bool  # SDPA's causal corner, top left, means the same


def need_torch() -> None:
    if torch is None:
        raise Cannot("torch is not installed; pip install torch")


def rows_of(w: Workload, name: str, b: int | None) -> Any:
    """Index of a sequence's rows in an operand of queries or keys."""
    if b is None:
        return slice(None)
    rows: Rows = w.rows("q" if name in ("q", "out", "dout", "lse", "dlse") else "k", b)
    return slice(rows.plane, rows.plane + 1), slice(rows.first, rows.first + rows.used)


def has_any(w: Workload, *names: str) -> bool:
    return any(n in w.operands for n in names)


def has_mask(w: Workload) -> bool:
    p = w.problem
    return bool(has_any(w, *ELEMENTS) or p.causal or p.has_window or p.has_prefix or p.chunk)


def parts_of(w: Workload, shared: Arrays, wanted: set[str]) -> list[Part]:
    alike = not w.is_cache and not any(n.startswith(("cu_seqlens", "seqused", "corner_off")) for n in w.operands)
    return [part_of(w, b, shared, wanted) for b in ([None] if alike else range(w.problem.batch))]


def part_of(w: Workload, b: int | None, shared: Arrays, wanted: set[str]) -> Part:
    def leaf(name: str) -> Array:
        view = w.arrays[name] if w.is_cache and name != "q" else w.arrays[name][rows_of(w, name, b)]
        return view.transpose(1, 2).detach().requires_grad_(name in wanted)

    first = b or 0
    q, k = (w.rows("q", first).used, w.rows("k", first).used) if w.problem.batch else (w.problem.len_q, w.problem.len_k)
    kept = distance = None
    if has_mask(w) and w.problem.batch:
        several = b is None and any(w.operands[n].extents[0] > 1 for n in ELEMENTS if n in w.operands)
        kept = torch.stack([torch.from_numpy(w.kept(n)) for n in (range(w.problem.batch) if several else [first])])
    slopes, bias = shared.get("slopes"), shared.get("bias")
    if slopes is not None:
        distance = (torch.arange(q)[:, None] + w.offset(first) - torch.arange(k)).abs()
        slopes = (slopes if b is None or slopes.shape[0] == 1 else slopes[b : b + 1]).transpose(1, 2)
    if bias is not None and b is not None:
        bias = grid(bias, b, q, k)[None]
    at_corner = w.problem.batch > 0 and w.offset(first) == 0
    return Part(b, leaf("q"), leaf("k"), leaf("v"), kept, distance, bias, slopes, at_corner)


def peer(w: Workload, attend: Callable[[Part, Arrays], tuple], mine: Arrays, how: str) -> Call:
    """attend(part, {bias, slopes, sinks}): (out,) or (out, lse), each (B, Hq, Sq, ..)."""
    need_torch()
    backward = w.problem.pass_ == BACKWARD
    wanted = {n[1:] for n in w.results} if backward else set()
    numbers: tuple[str, ...] = tuple(n for n in ("bias", "slopes", "sinks") if n in w.operands)
    shared: Arrays = {n: w.arrays[n].detach().requires_grad_(n in wanted) for n in numbers}
    parts = parts_of(w, shared, wanted)
    if len(parts) > 1 or (parts and parts[0].b is not None):
        how += ", one call a sequence"
    for name in w.results:  # what no part writes
        mine[name].fill_(0)

    def put(name: str, part: Part, value: Array) -> None:
        mine[name][rows_of(w, name.removeprefix("d"), part.b)] = value.transpose(1, 2)

    if not backward:

        def run() -> list[tuple]:
            with torch.no_grad():
                return [attend(part, shared) for part in parts]

        def results(made: list[tuple]) -> Arrays:
            for part, (out, *_) in zip(parts, made):
                put("out", part, out)
            return mine

        return Call(run, results, ("out",) + (("k", "v") if "k_new" in mine else ()), how)

    graph = [attend(part, shared) for part in parts]
    outs = [x for several in graph for x in several]
    given = ("dout", "dlse")[: len(graph[0]) if graph else 0]
    douts = [w.arrays[n][rows_of(w, n, part.b)].transpose(1, 2) for part in parts for n in given]
    places = [(n, part, getattr(part, n)) for part in parts for n in ("q", "k", "v") if n in wanted]
    alone = [n for n in shared if n in wanted]
    leaves = [x for _, _, x in places] + [shared[n] for n in alone]

    def gradients() -> Any:
        return torch.autograd.grad(outs, leaves, douts, retain_graph=True, allow_unused=True) if outs else ()

    def scatter(grads: Any) -> Arrays:
        for (name, part, _), grad in zip(places, grads):
            if grad is not None:
                put("d" + name, part, grad)
        for other, grad in zip(alone, grads[len(places) :]):
            if grad is not None:
                mine["d" + other].copy_(grad)
        return mine

    return Call(gradients, scatter, w.results, how + ", autograd.grad")


def scale_of(w: Workload) -> float:
    return w.problem.scale if w.problem.has_scale else 1 / math.sqrt(w.problem.dim)


def naive(w: Workload, _: Settings) -> Call:
    """softmax(q k^T) v with the whole score matrix: products in q's dtype, softmax in float32 (float64 of f64)."""
    need_torch()
    p = w.problem
    if p.dropout:
        raise Cannot("torch's dropout draws numbers of its own")
    if p.pass_ > BACKWARD:
        raise Cannot("an append attends nothing")
    if w.operands["out"].dtype != w.operands["q"].dtype:
        raise Cannot("naive's products have q's dtype")
    mine = w.fresh()
    cache = Cache(w, mine) if w.is_cache else None
    exact = torch.float64 if w.operands["q"].dtype == "f64" else torch.float32
    group = p.heads_q // p.heads_kv

    def attend(part: Part, shared: Arrays) -> tuple:
        q, k, v = cache.read(part) if cache else part[1:4]
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = (q @ k.mT).to(exact) * scale_of(w)
        if p.softcap:
            scores = p.softcap * torch.tanh(scores / p.softcap)
        if part.slopes is not None:
            scores = scores - part.slopes * part.distance
        if part.bias is not None:
            scores = scores + part.bias.to(exact)
        if part.kept is not None:
            scores = scores.masked_fill(~part.kept, -math.inf)
        if "sinks" in shared:
            sinks = shared["sinks"].transpose(1, 2).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = torch.softmax(scores, -1)[..., : k.shape[2]]
        if part.kept is not None:
            weights = weights.masked_fill(~part.kept, 0)  # rows that see nothing
        out = (weights.to(q.dtype) @ v).to(mine["out"].dtype)
        return (out, torch.logsumexp(scores, -1, keepdim=True)) if "dlse" in w.operands else (out,)

    return peer(w, attend, mine, "materialised" + (", gathers its keys" if cache else ""))


class Cache:
    """A cache as torch reads it: rotate and write the new tokens, then gather a sequence's keys, by index."""

    def __init__(self, w: Workload, arrays: Arrays):
        self.w, self.arrays = w, arrays
        places = (w.places(b) for b in range(w.problem.batch))
        self.places = [tuple(torch.from_numpy(x).long() for x in one) for one in places]

    def read(self, part: Part) -> tuple[Array, Array, Array]:
        w, b = self.w, part.b or 0
        new, (planes, rows) = w.rows("new", b), self.places[b]
        q = part.q
        if "k_new" in w.operands and new.used:
            at = planes[-new.used :], rows[-new.used :]
            for name in ("k",) if w.problem.v_in_k else ("k", "v"):
                x = w.arrays[name + "_new"][new.plane, new.first : new.first + new.used]
                self.write(name, at, self.rotate(x, len(rows) - new.used) if name == "k" else x)
        if len(rows):
            q = self.rotate(q[0].transpose(0, 1), w.offset(b)).transpose(0, 1)[None]
        return q, *(self.gather(n, (planes, rows)).to(q.dtype).transpose(0, 1)[None] for n in ("k", "v"))

    def rotate(self, x: Array, position: int) -> Array:
        """x: (tokens, H, D), the first at `position`."""
        size = self.w.problem.rotary_dim
        if not size:
            return x
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = (self.w.arrays[n][0, position : position + len(x), :].to(exact) for n in ("cos", "sin"))
        turned = x[..., :size].to(exact)
        split = self.w.problem.rotary_interleaved
        a, b = (turned[..., ::2], turned[..., 1::2]) if split else turned.chunk(2, -1)
        pair = a * cos - b * sin, a * sin + b * cos
        made = torch.stack(pair, -1).flatten(-2) if split else torch.cat(pair, -1)
        return torch.cat([made.to(x.dtype), x[..., size:]], -1)

    def scale(self, name: str, at: tuple) -> Array:
        scale = self.arrays[name + "_scale"]
        return scale.expand(*self.arrays[name].shape[:2], *scale.shape[2:])[at]

    def write(self, name: str, at: tuple, x: Array) -> None:
        if self.w.operands[name].dtype != "e4m3":
            self.arrays[name][at] = x
            return
        if name + "_scale" in self.arrays:
            x = x.float() / self.scale(name, at)
        stored = x.float().clamp(-448, 448).to(torch.float8_e4m3fn)
        self.arrays[name].view(torch.uint8)[at] = stored.view(torch.uint8)

    def gather(self, name: str, at: tuple) -> Array:
        if self.w.operands[name].dtype != "e4m3":
            return self.arrays[name][at]
        x = self.arrays[name].view(torch.uint8)[at].view(torch.float8_e4m3fn).float()
        return x * self.scale(name, at) if name + "_scale" in self.arrays else x


def refuse_in(name: str, w: Workload, more: dict[str, bool]) -> None:
    """Sentences about what flash kernels of torch do not have."""
    p, o = w.problem, w.operands
    known = {
        "torch's dropout draws numbers of its own": bool(p.dropout),
        f"{name} has no KV cache (pages, append, rotary, scales)": w.is_cache or p.pass_ > BACKWARD or p.rotary_dim > 0,
        f"{name} has no sinks": "sinks" in o,
        f"{name} returns no lse, so it has no gradient": "dlse" in o,
        f"{name} takes no e4m3": "k" in o and o["k"].dtype == "e4m3",
        f"{name} returns q's dtype": "out" in o and o["out"].dtype != o["q"].dtype,
        **more,
    }
    for why, true in known.items():
        if true:
            raise Cannot(why)


def sdpa(w: Workload, _: Settings) -> Call:
    """torch.nn.functional.scaled_dot_product_attention on views (B, H, S, D) of the line's memory. Its causal corner is
    top left: is_causal only where that is what the line means, else the mask is an explicit bool, or, with bias or
    slopes, a float one in q's dtype."""
    need_torch()
    p = w.problem
    old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5)
    grouped = p.heads_q != p.heads_kv
    more = {"sdpa has no softcap": p.softcap != 0, f"sdpa of torch {torch.__version__} has no enable_gqa": old and grouped}
    refuse_in("sdpa", w, more)
    groups = {"enable_gqa": True} if grouped else {}
    biased = has_any(w, "bias", "slopes")
    only_causal = bool(p.causal) and not (p.has_window or p.chunk or p.has_prefix or biased or has_any(w, *ELEMENTS))
    masks: dict[int, Array | None] = {}

    def mask_of(part: Part) -> Array | None:
        if part.bias is None and part.slopes is None:
            return part.kept
        exact = torch.float64 if part.q.dtype == torch.float64 else torch.float32
        scores = torch.zeros(part.q.shape[2], part.k.shape[2], dtype=exact)
        scores = scores if part.slopes is None else scores - part.slopes * part.distance
        scores = scores if part.bias is None else scores + part.bias.to(exact)
        return (scores if part.kept is None else scores.masked_fill(~part.kept, -math.inf)).to(part.q.dtype)

    def attend(part: Part, _: Arrays) -> tuple:
        causal = only_causal and part.at_corner
        if id(part) not in masks:
            masks[id(part)] = None if causal else mask_of(part)
        attention = torch.nn.functional.scaled_dot_product_attention
        return (attention(*part[1:4], masks[id(part)], is_causal=causal, scale=scale_of(w), **groups),)

    corner = all(w.offset(b) == 0 for b in range(p.batch))
    how = (
        "is_causal" if only_causal and corner else "float mask" if biased else "bool mask" if has_mask(w) else "no mask"
    )
    return peer(w, attend, w.fresh(), how)


def flash_attn(w: Workload, _: Settings) -> Call:
    """flash_attn.flash_attn_func on copies in GPU memory, made before the clock starts; tessera runs where it runs."""
    need_torch()
    try:
        from flash_attn import flash_attn_func  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise Cannot("flash_attn is not installed; it needs an NVIDIA GPU (pip install flash-attn)") from None
    if not torch.cuda.is_available():
        raise Cannot("flash_attn needs an NVIDIA GPU, and torch sees none")
    p, o = w.problem, w.operands
    more = {
        "flash_attn is asked for forward lines only": p.pass_ == BACKWARD,
        "flash_attn takes bf16 and f16": "q" in o and o["q"].dtype not in ("bf16", "f16"),
        "flash_attn has no bias": "bias" in o,
        "flash_attn_func takes no packed or partly used sequences": any(n.startswith(("cu_", "seqused")) for n in o),
        "flash_attn has causal and window masks only": bool(p.has_prefix or p.chunk or p.first)
        or has_any(w, *ELEMENTS),
        "flash_attn's corner is bottom right": p.corner not in (0, BOTTOM_RIGHT),
    }
    refuse_in("flash_attn", w, more)
    window = (
        -1 if not p.has_window or p.window_left_unbounded else p.window_left,
        -1 if not p.has_window or p.window_right_unbounded else p.window_right,
    )
    options = {"softmax_scale": scale_of(w), "causal": bool(p.causal), "window_size": window, "softcap": p.softcap}
    moved: dict[int, list[Array]] = {}

    def attend(part: Part, _: Arrays) -> tuple:
        if id(part) not in moved:
            moved[id(part)] = [x.cuda().transpose(1, 2) for x in part[1:4]]
            options["alibi_slopes"] = None if part.slopes is None else part.slopes[:, :, 0, 0].float().cuda()
        out = flash_attn_func(*moved[id(part)], **options)
        torch.cuda.synchronize()
        return (out.transpose(1, 2),)

    return peer(w, attend, w.fresh(), "on cuda, " + torch.cuda.get_device_name())


CONTENDERS: dict[str, Callable[[Workload, Settings], Call]] = {
    "tessera": tessera_contender,
    "sdpa": sdpa,
    "flash_attn": flash_attn,
    "naive": naive,
}

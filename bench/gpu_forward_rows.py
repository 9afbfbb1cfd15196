#!/usr/bin/env python3
"""Forward on this machine's GPU beyond the cells of bench/gpu_peers.py, measured as that file measures: other dims,
shared KV heads, windows, packed and odd lengths, biases, masks, softcap, dropout, few heads, sinks, pages. bf16.

A line is a ratio of two rates of the same rounds, with the spread of the rounds: to the matrix product, to another call
of ours or to a peer. A result that differs from SDPA's, or where SDPA has no such option from float32's at one head,
has no speed. Peers are SDPA's, where it takes the same arguments.

    python bench/gpu_forward_rows.py [--rounds N] [--only ROWS] [--json FILE]
"""

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from gpu_more import EFFICIENT, FLASH, sdpa
from gpu_peers import race
from torch.nn.attention import SDPBackend

import tessera

DEVICE, K = "cuda", 1024  # K: a thousand tokens, of which --tiny takes fewer
PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": FLASH}
LENGTHS = Path(__file__).with_name("lengths_64.txt")
# Of a row, relative to its length. Rounding weights and results to bf16, on both sides, makes 0.01 at most, 128 keys of
# 4096 left out some 0.2.
MOST_WRONG = 0.02


@dataclass
class Contestant:
    run: Callable  # returns a tessera.Result
    check: Callable  # how wrong its out is
    flops: float
    counted: float | None = None  # in ratios, instead of FLOP
    peers: dict[str, Callable] = field(default_factory=dict)


class Line(NamedTuple):
    what: str
    ours: str
    beside: str  # a contestant, "CONTESTANT by PEER", or the product
    bar: float | None


class Contest(NamedTuple):
    """What takes turns, and what is said of it."""

    calls: dict[str, Contestant]
    lines: list[Line]
    graph_of: int = 1  # so many calls make a CUDA graph, where they are so short that Python's time would be measured


# ------------------------------------------------------------------------------------------------------------ calls


def normal(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def ints(numbers):
    return torch.tensor(numbers, device=DEVICE, dtype=torch.int32)


def tensors(batch, length, heads=16, dim=128, kv=None, dim_v=None):
    kv, dim_v = kv or heads, dim_v or dim
    return normal(batch, length, heads, dim), normal(batch, length, kv, dim), normal(batch, length, kv, dim_v)


def pairs(rows, keys, causal):
    """Kept ones; the last row sees the last key."""
    return rows * keys - (rows * (rows - 1) // 2 if causal else 0)


def tile_pairs(plan, length, causal):
    """Those in the tiles that are multiplied, whole ones: what an odd length costs at least."""
    total = 0
    for first in range(0, length, plan.tile_rows):
        keys = min(length, first + plan.tile_rows) if causal else length
        total += plan.tile_rows * math.ceil(keys / plan.tile_keys) * plan.tile_keys
    return total


def attend(q, k, v, causal=False, *, flops=None, check=None, peers=None, **options):
    """tessera on these, beside SDPA if there are no options."""
    options = {"mask": "causal" if causal else None} | options
    plain = {"is_causal": causal, "enable_gqa": q.shape[-2] != k.shape[-2]}
    if peers is None:
        peers = {} if check else {n: lambda b=b: sdpa(b, q, k, v, **plain) for n, b in PEERS.items()}
    if flops is None:
        flops = 2 * (q.shape[3] + v.shape[3]) * q.shape[0] * q.shape[2] * pairs(q.shape[1], k.shape[1], causal)
    run = lambda: tessera.attention(q, k, v, **options)  # noqa: E731
    return Contestant(run, check or by_sdpa(q, k, v, **plain), flops, peers=peers)


def error(out, expected):
    """Of the worst row; infinite if there is a NaN."""
    out, expected = out.float(), expected.float()
    rows = (out - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)
    return rows.max().nan_to_num(nan=math.inf).item()


def by_sdpa(q, k, v, **options):
    return lambda out: error(out, sdpa([FLASH, EFFICIENT, SDPBackend.MATH], q, k, v, **options))


def by_sample(q, k, v, causal=False, *, softcap=0.0, sinks=None, dropout=0.0):
    """In float32, of the last sequence's last head."""

    def check(out):
        s, d = q[-1, :, -1].float() @ k[-1, :, -1].float().T, q.shape[3]
        s *= d**-0.5
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        if causal:
            s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf)
        if sinks is not None:
            s = torch.cat([s, sinks[-1].expand(len(s), 1)], 1)
        weights = torch.softmax(s, 1)[:, : k.shape[1]]
        if dropout:
            kept, (batch, _, heads, _) = numpy.empty(weights.shape, bool), q.shape
            tessera._tessera.dropout_mask(dropout, 0, 0, batch - 1, heads - 1, heads, *weights.shape, kept)
            weights = weights * torch.from_numpy(kept).to(DEVICE) / (1 - dropout)
        return error(out[-1, :, -1], weights @ v[-1, :, -1].float())

    return check


# ------------------------------------------------------------------------------------------------------------- rows


def masks_by_name():
    return (("full", False), ("causal", True))


def uneven_dims():
    call = attend(*tensors(2, 8 * K, dim=192, dim_v=128), causal=True)
    yield Contest({"call": call}, [Line("dims 192/128 causal 8k", "call", "product", 0.85)])


def dims():
    """Beside the next dim that has tiles of its own; FLOP as if dims were multiples of 16."""
    neighbours = {72: 96, 80: 96, 96: 128, 112: 128, 160: 192}
    for name, causal in masks_by_name():
        calls = {}
        for dim in sorted({*neighbours, *neighbours.values()}):
            call = attend(*tensors(4, 4 * K, dim=dim), causal)
            calls[f"{dim}"] = replace(call, counted=call.flops * math.ceil(dim / 16) * 16 / dim)
        lines = [Line(f"dim {d} {name} 4k, padded FLOP", f"{d}", f"{n}", 0.85) for d, n in neighbours.items()]
        yield Contest(calls, lines)


def gqa():
    for name, causal in masks_by_name():
        for heads in (32, 64):
            calls = {f"{heads}/{kv}": attend(*tensors(4, 4 * K, heads, kv=kv), causal) for kv in (8, heads)}
            few, every = calls
            yield Contest(calls, [Line(f"heads {few} {name} 4k", few, every, 1.0)])


def window():
    (q, k, v), left = tensors(1, 16 * K), K - 1
    i = torch.arange(16 * K, device=DEVICE)
    away = i[:, None] - i
    kept = (away >= 0) & (away <= left)
    flops = 4 * 128 * 16 * kept.sum().item()
    call = attend(q, k, v, mask=tessera.Mask.window(left, 0), flops=flops, check=by_sdpa(q, k, v, attn_mask=kept))
    yield Contest({"call": call}, [Line("window(1023,0) 16k, kept pairs", "call", "product", 0.62)])


def varlen():
    text = [line for line in LENGTHS.read_text().splitlines() if not line.startswith("#")]
    lengths = [max(1, int(n) * K // 1024) for n in text]
    equal = round(math.sqrt(statistics.mean(n * n for n in lengths)))
    batch = tensors(len(lengths), equal)
    whole = attend(*batch, causal=True)

    def packed(name, q, k, v, lengths):
        ends = numpy.cumsum([0, *lengths]).tolist()

        def check(out):
            parts = [slice(a, b) for a, b in zip(ends, ends[1:])]
            return max(by_sdpa(q[None, p], k[None, p], v[None, p], is_causal=True)(out[None, p]) for p in parts)

        cu, flops = ints(ends), 4 * 128 * 16 * sum(pairs(n, n, True) for n in lengths)
        bounds = {"max_len_q": max(lengths), "max_len_k": max(lengths)}
        return {name: attend(q, k, v, True, flops=flops, check=check, cu_seqlens_q=cu, cu_seqlens_k=cu, **bounds)}

    calls = {"equal lengths": whole} | packed("packed", *(x[0] for x in tensors(1, sum(lengths))), lengths)
    calls |= packed("equal lengths, packed", *(x.flatten(0, 1) for x in batch), [equal] * len(lengths))
    what = f"{len(lengths)} packed lengths, {min(lengths)} to {max(lengths)}, causal"
    yield Contest(calls, [Line(what, "packed", name, 0.9) for name in calls if name != "packed"])


def odd_lengths():
    """Beside 4096, by the work of the tiles."""
    for name, causal in masks_by_name():
        calls = {}
        for length in (4 * K, 4 * K - 1, 4 * K + 1):
            call = attend(*tensors(4, length), causal)
            calls[f"{length}"] = replace(call, counted=tile_pairs(call.run().plan, length, causal))
        even, *odd = calls
        yield Contest(calls, [Line(f"length {n} {name}, work of tiles", n, even, 0.97) for n in odd])


def masks():
    q, k, v = tensors(2, 8 * K)
    blocks = torch.arange(8 * K, device=DEVICE) // (K // 2)
    square = (8 * K, 8 * K)

    def masked(array, **options):
        given = {"attn_mask": array.expand(2, 16, *square)}
        peers = {"efficient": lambda: sdpa(EFFICIENT, q, k, v, **given)}
        return attend(q, k, v, check=by_sdpa(q, k, v, **given), peers=peers, **options)

    def bias(heads):
        made = normal(1, heads, *square)
        return masked(made, bias=made)

    def keep(grid):
        return masked(grid, mask=tessera.Mask.keep(grid[None, None]))

    calls = {
        "no mask": attend(q, k, v),
        "bias a head": bias(16),
        "one bias": bias(1),
        "random half kept": keep(torch.rand(*square, device=DEVICE) < 0.5),
        "block-causal kept": keep(blocks[:, None] >= blocks),
    }
    yield Contest(calls, [Line(f"{name} 8k, all pairs", name, "no mask", 0.6) for name in calls if name != "no mask"])


def scores():
    """Scores of size 1 lie where softcap does next to nothing: of size 16 too."""
    for name, causal in masks_by_name():
        q, k, v = tensors(4, 4 * K)
        large = q * 16
        call = lambda q, **o: attend(q, k, v, causal, check=by_sample(q, k, v, causal, **o), **o)  # noqa: B023, E731
        calls = {
            "without": attend(q, k, v, causal),
            "softcap": call(q, softcap=50.0),
            "dropout": call(q, dropout=0.1),
            "without, size 16": call(large),
            "softcap, size 16": call(large, softcap=50.0),
        }
        lines = [
            Line(f"softcap 50 {name} 4k", "softcap", "without", 0.8),
            Line(f"softcap 50 {name} 4k, scores of size 16", "softcap, size 16", "without, size 16", 0.8),
            Line(f"dropout 0.1 {name} 4k", "dropout", "without", 0.75),
        ]
        yield Contest(calls, lines)


def few_heads():
    for heads in (1, 2):
        for length in (1, 2, 4, 8):
            call = attend(*tensors(1, length * K, heads))
            what = f"{heads} head{'s'[: heads - 1]} {length}k, in a graph"
            lines = [Line(what, "call", f"call by {peer}", 1.2) for peer in call.peers]
            yield Contest({"call": call}, lines, graph_of=20)


def sinks():
    q, k, v = tensors(4, 4 * K)
    sinks = 8 + torch.randn(16, device=DEVICE)  # as much as some thousand keys
    drained = attend(q, k, v, True, sinks=sinks, check=by_sample(q, k, v, True, sinks=sinks))
    calls = {"without": attend(q, k, v, True), "sinks": drained}
    yield Contest(calls, [Line("sinks causal 4k", "sinks", "without", None)])


def paged():
    """4k new tokens, with those before them in the cache already."""
    new, slots = 4 * K, 12 * K
    lengths = [new + n * K // 4 for n in (16, 21, 27, 32)]
    q, k, v = normal(4, new, 32, 128), normal(4, slots, 8, 128), normal(4, slots, 8, 128)
    used, i = ints(lengths), torch.arange(slots, device=DEVICE)

    def wrong(out, b, n):
        given = {"attn_mask": i[:n] <= i[n - new : n, None], "enable_gqa": True}
        return by_sdpa(q[b, None], k[b, None, :n], v[b, None, :n], **given)(out[b, None])

    check = lambda out: max(wrong(out, b, n) for b, n in enumerate(lengths))  # noqa: E731
    flops = 4 * 128 * 32 * sum(pairs(new, n, True) for n in lengths)
    whole = attend(q, k, v, True, seqused_k=used, flops=flops, check=check)
    calls = {"no cache": whole}
    for page in (16, 256):
        page = max(1, page * K // 1024)
        table = torch.randperm(4 * slots // page, device=DEVICE).int()
        pools = []
        for x in (k, v):
            pool = torch.empty(len(table), page, 8, 128, device=DEVICE, dtype=x.dtype)
            pool[table.long()] = x.view(pool.shape)
            pools.append(pool)
        cache = {"cache_lens": used, "page_table": table.view(4, -1)}
        run = lambda pools=pools, cache=cache: tessera.decode(q, *pools, mask="causal", **cache)  # noqa: E731
        calls[f"pages of {page}"] = replace(whole, run=run)
    what = "heads 32/8, causal, 4k new of 8k to 12k"
    yield Contest(calls, [Line(f"{name}, {what}", name, "no cache", None) for name in calls if name != "no cache"])


ALL = (uneven_dims, dims, gqa, window, varlen, odd_lengths, masks, scores, few_heads, sinks, paged)
ROWS = {row.__name__: row for row in ALL}

# ------------------------------------------------------------------------------------------------------------- race


def once(calls, rounds):
    """In race's place where there is no GPU: no figure, but all that is done with one."""
    times = {}
    for name, call in calls.items():
        start = time.perf_counter()
        call()
        times[name] = [time.perf_counter() - start] * rounds
    return times


def replayed(call, times):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph.replay


def agrees(peer, out):
    """Whether the peer answers at all, and the same."""
    try:
        return error(peer(), out) <= MOST_WRONG
    except RuntimeError:
        return False


def compete(row, contest, rounds, matrix):
    """A dictionary for each line; without a ratio, but with a why, where a result is wrong or a peer has none."""
    runs, kernels, wrong = {}, {}, {}
    flops = {"product": 2 * len(matrix) ** 3}
    counted = dict(flops)
    for name, call in contest.calls.items():
        result = call.run()
        kernels[name], wrong[name] = result.plan.kernel, call.check(result.out)
        if wrong[name] > MOST_WRONG:
            continue
        peers = {f"{name} by {n}": peer for n, peer in call.peers.items() if agrees(peer, result.out)}
        for each, run in {name: call.run, **peers}.items():
            runs[each], flops[each], counted[each] = run, call.flops, call.counted or call.flops
    calls_a_run = contest.graph_of if DEVICE == "cuda" else 1
    if calls_a_run > 1:
        runs = {name: replayed(run, calls_a_run) for name, run in runs.items()}
    times = (race if DEVICE == "cuda" else once)(runs | {"product": lambda: matrix @ matrix}, rounds)
    for name in runs:
        times[name] = [t / calls_a_run for t in times[name]]
    rate = {name: flops[name] / statistics.median(t) * 1e-12 for name, t in times.items()}
    share = {name: r / rate["product"] for name, r in rate.items()}

    def told(line):
        ours, beside = line.ours, line.beside
        facts = {"row": row, **line._asdict(), "kernel": kernels[ours], "beside_kernel": kernels.get(beside)}
        if ours not in times or beside not in times:
            bad = [f"{n} is wrong by {wrong[n]:.3f}" for n in (ours, beside) if n in wrong and n not in times]
            return facts | {"why": ", ".join(bad) or "no such peer"}
        ratio = lambda mine, other: counted[ours] / mine / (counted[beside] / other)  # noqa: E731
        each = [ratio(*pair) for pair in zip(times[ours], times[beside])]
        mine = f"{ours} by "
        return facts | {
            "ratio": ratio(statistics.median(times[ours]), statistics.median(times[beside])),
            "spread": (min(each), max(each)),
            "rate": rate[ours],
            "share": share[ours],
            "beside_rate": rate[beside],
            "product": rate["product"],
            "peers": {n.removeprefix(mine): (rate[n], share[n]) for n in rate if n.startswith(mine)},
            "wrong": wrong[ours],
        }

    return [told(line) for line in contest.lines]


def cells(f):
    """Of a line in the table."""
    bar, beside = "" if f["bar"] is None else f"{f['bar']:.2f}", f["beside"].removeprefix("call by ")
    if "why" in f:
        return [f["row"], f["what"], "", "", beside, f["why"], bar, "", f["kernel"]]
    peers = ", ".join(f"{n} {rate:.0f} ({share:.2f})" for n, (rate, share) in f["peers"].items())
    return [
        f["row"],
        f["what"],
        f"{f['rate']:.0f} ({f['share']:.2f})",
        peers,
        f"{beside} {f['beside_rate']:.0f}" + (f" ({f['beside_kernel']})" if f["beside_kernel"] else ""),
        f"{f['ratio']:.2f} ({f['spread'][0]:.2f} to {f['spread'][1]:.2f})",
        bar,
        "" if f["bar"] is None else "yes" if f["ratio"] >= f["bar"] else "no",
        f["kernel"],
    ]


def main():
    global DEVICE, K
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS, metavar="ROWS", help=", ".join(ROWS))
    parser.add_argument("--json")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # on a CPU, to see that it all works
    a = parser.parse_args()
    if a.tiny:
        DEVICE, K = "cpu", 32
    warnings.filterwarnings("ignore", category=UserWarning)  # SDPA's, why a backend does not answer
    torch.manual_seed(0)
    start = time.perf_counter()
    matrix = normal(8 * K, 8 * K)
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE
    print(f"{where}, torch {torch.__version__}, {a.rounds} rounds; bf16, D128 and 16 heads unless said; TFLOP/s and in")
    print("brackets shares of the matrix product; ratios with the spread of the rounds.\n")
    print("| row | what | Tessera | peers | beside | ratio | bar | reached | kernel |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    facts = []
    for row in a.only:
        try:
            for contest in ROWS[row]():
                for line in compete(row, contest, a.rounds, matrix):
                    facts.append(line)
                    print(f"| {' | '.join(cells(line))} |", flush=True)
        except (RuntimeError, ValueError) as why:  # the other rows are worth having
            facts.append({"row": row, "failed": str(why)})
            print(f"| {row} | failed: {str(why).splitlines()[0]} | | | | | | no | |", flush=True)
    print(f"\n{time.perf_counter() - start:.0f} s")
    if a.json:
        Path(a.json).write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()

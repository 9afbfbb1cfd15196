#!/usr/bin/env python3
"""Forward on this machine's GPU beside its peers: FlashAttention-2 and cuDNN through torch's SDPA, FlashAttention-3 where it
can be imported, and a matrix product of 8192^3, whose rate says what the chip gives at that moment.

All take turns, in bursts of about 30 ms and an order shuffled anew each round; medians of rounds. A result that does not
agree with the peers' on the same inputs has no speed. Shares are of the matrix product of the same rounds.

    python bench/gpu_peers.py [--rounds N] [--dims 64 128 256] [--lengths 512 4096] [--kernels NAMES] [--json FILE]
"""

import argparse
import json
import math
import random
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tessera

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# FlashAttention-3's shares of the matrix product on another H200 (2026-11-29, its source of August 2026, the same
# method), for machines where it is not installed.
FA3_SHARES = {
    (128, False): (0.66, 0.75, 0.84, 0.84, 0.88, 0.93),
    (128, True): (0.41, 0.64, 0.81, 0.81, 0.88, 0.95),
    (64, False): (0.36, 0.41, 0.57, 0.60, 0.63, 0.64),
    (64, True): (0.26, 0.34, 0.48, 0.56, 0.61, 0.66),
    (256, False): (0.67, 0.83, 0.91, 0.95, 1.01, 0.99),
    (256, True): (0.43, 0.62, 0.81, 0.94, 1.00, 1.04),
}


def burst(call, n):
    """Seconds a call, by the device's clock."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(n):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / n * 1e-3


def race(calls, rounds, seconds=0.03):
    """{name: [seconds a call, one a round]}"""
    counts, times = {}, {name: [] for name in calls}
    for name, call in calls.items():
        burst(call, 3)
        counts[name] = max(1, min(1000, round(seconds / burst(call, 2))))
    for _ in range(rounds):
        for name, call in random.sample(list(calls.items()), len(calls)):
            times[name].append(burst(call, counts[name]))
    return times


def sdpa(backend, q, k, v, causal):
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]

    def call():
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2])
            return out.transpose(1, 2)

    return call


def fa3():
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError:
        return None
    return lambda q, k, v, causal: flash_attn_func(q, k, v, causal=causal)


def contestants(q, k, v, causal, kernels):
    ours = lambda: tessera.attention(q, k, v, mask="causal" if causal else None, kernels=kernels).out  # noqa: E731
    calls = {
        "tessera": ours,
        "FA2": sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, causal),
        "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, causal),
    }
    if peer := fa3():
        calls["FA3"] = lambda: peer(q, k, v, causal)
    for name, call in calls.items():
        difference = (call().float() - ours().float()).abs().max().item()
        assert difference < 0.03, f"tessera differs from {name} by {difference}"
    return calls


def cell(dim, causal, length, kernels, rounds, matrix):
    batch, heads = 16384 // length, 2048 // dim
    q, k, v = (torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    times = race(contestants(q, k, v, causal, kernels) | {"product": lambda: matrix @ matrix}, rounds)
    flops = 4 * batch * heads * length**2 * dim / (2 if causal else 1)
    work = dict.fromkeys(times, flops) | {"product": 2 * 8192**3}
    speed = {n: work[n] / statistics.median(t) * 1e-12 for n, t in times.items()}
    share = {n: s / speed["product"] for n, s in speed.items()}
    share.setdefault("FA3", FA3_SHARES[dim, causal][LENGTHS.index(length)])
    to_fa2 = [f / t for f, t in zip(times["FA2"], times["tessera"])]
    return {
        "dim": dim,
        "causal": causal,
        "length": length,
        "speed": speed,
        "share": share,
        "to_best": share["tessera"] / max(share["FA3"], share["cuDNN"]),
        "to_fa2": share["tessera"] / share["FA2"],
        "spread": (min(to_fa2), max(to_fa2)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 64, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--kernels", help="of Tessera that may be chosen")
    parser.add_argument("--json")
    a = parser.parse_args()
    torch.manual_seed(0)
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; bf16, 16k tokens, hidden 2048; TFLOP/s and")
    print(f"shares of the matrix product. FA3 is {'measured' if fa3() else 'its share on another H200'}.\n")
    print("| dim, mask, length | Tessera | cuDNN | FA2 | FA3's share | product | to the better of cuDNN, FA3 | to FA2 |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    cells = []
    for dim in a.dims:
        for causal in (False, True):
            for length in a.lengths:
                c = cell(dim, causal, length, a.kernels, a.rounds, matrix)
                cells.append(c)
                both = lambda n: f"{c['speed'][n]:.0f} ({c['share'][n]:.2f})"  # noqa: B023, E731
                print(
                    f"| {dim} {'causal' if causal else 'full'} {length} | {both('tessera')} | {both('cuDNN')} "
                    f"| {both('FA2')} | {c['share']['FA3']:.2f} | {c['speed']['product']:.0f} | {c['to_best']:.2f} "
                    f"| {c['to_fa2']:.2f} ({c['spread'][0]:.2f} to {c['spread'][1]:.2f}) |",
                    flush=True,
                )
    mean = lambda name: math.exp(statistics.mean(math.log(c[name]) for c in cells))  # noqa: E731
    least = min(c["to_best"] for c in cells)
    print(f"\nGeometric means: {mean('to_best'):.3f} to the better of cuDNN and FA3 (least {least:.2f}), ", end="")
    print(f"{mean('to_fa2'):.2f} to FA2.")
    if a.json:
        with open(a.json, "w") as file:
            json.dump(cells, file)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Forward on this machine's GPU beside what torch brings (FlashAttention-2 and cuDNN through SDPA) and a matrix product.

All take turns, in bursts of about 30 ms and an order shuffled anew each round; medians of rounds. A result that does not
agree with the peers' on the same inputs has no speed.

    python bench/gpu_forward.py [--rounds N] [--dims 64 128] [--lengths 512 4096] [--json FILE]
"""

import argparse
import json
import random
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tessera


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
            return F.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2])

    return call


def contestants(q, k, v, causal, matrix):
    mask = "causal" if causal else None
    ours = lambda: tessera.attention(q, k, v, mask=mask).out  # noqa: E731
    calls = {"tessera": ours}
    peers = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    for name, backend in peers.items():
        call = sdpa(backend, q, k, v, causal)
        difference = (call().transpose(1, 2).float() - ours().float()).abs().max().item()
        assert difference < 0.03, f"tessera differs from {name} by {difference}"
        calls[name] = call
    return calls | {"matrix product": lambda: matrix @ matrix}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--json")
    a = parser.parse_args()
    torch.manual_seed(0)
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rows = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; bf16, 16k tokens, hidden 2048; TFLOP/s\n")
    print("| dim, mask, length | Tessera | FlashAttention-2 | cuDNN | matrix product | Tessera / FA2 | spread |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for dim in a.dims:
        for causal in (False, True):
            for length in a.lengths:
                batch, heads = 16384 // length, 2048 // dim
                q, k, v = (torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
                times = race(contestants(q, k, v, causal, matrix), a.rounds)
                flops = 4 * batch * heads * length**2 * dim / (2 if causal else 1)
                speed = {n: flops / statistics.median(t) * 1e-12 for n, t in times.items()}
                speed["matrix product"] = 2 * 8192**3 / statistics.median(times["matrix product"]) * 1e-12
                ratios = [f / t for f, t in zip(times["flash"], times["tessera"])]
                row = {"dim": dim, "causal": causal, "length": length, **speed, "ratio": speed["tessera"] / speed["flash"]}
                rows.append(row | {"spread": (min(ratios), max(ratios))})
                print(
                    f"| {dim} {'causal' if causal else 'full'} {length} | {speed['tessera']:.0f} | {speed['flash']:.0f} "
                    f"| {speed['cudnn']:.0f} | {speed['matrix product']:.0f} | {row['ratio']:.2f} "
                    f"| {min(ratios):.2f} to {max(ratios):.2f} |",
                    flush=True,
                )
    if a.json:
        with open(a.json, "w") as file:
            json.dump(rows, file)


if __name__ == "__main__":
    main()

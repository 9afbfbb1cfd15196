#!/usr/bin/env python3
"""What an eager call from torch costs at shapes where the arithmetic is next to nothing, beside torch's own SDPA:
interleaved rounds in one process, one thread, medians and spread; and where the microseconds go.

    python bench/host_time.py [--rounds N]        needs torch and the installed package
"""

import argparse
import statistics
import time

import torch

import tessera
from tessera.calls import Options, forward_caller

SHAPES = ((1, 2, 1, 16), (1, 2, 8, 16), (1, 2, 16, 16), (1, 4, 16, 32))  # batch, heads, seq, dim


def medians(calls, rounds, each=300):
    """Microseconds a call of each, rounds interleaved: (median, low quarter, high quarter)."""
    times = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(each):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(each):
                call()
            times[name].append((time.perf_counter() - start) / each * 1e6)
    return {name: statistics.quantiles(t, n=4) for name, t in times.items()}


def row(name, ours, peer):
    print(f"| {name} | {peer[1]:.2f} | {ours[1]:.2f} | {ours[0]:.2f} to {ours[2]:.2f} | {ours[1] / peer[1]:.2f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    facts = tessera.manifest()
    print(f"{facts['device']}, torch {facts['torch']}, Python {facts['python']}, one thread; microseconds\n")
    print("| batch, heads, seq, dim | torch SDPA | Tessera | quarters | ratio |\n| --- | --- | --- | --- | --- |")
    for shape in SHAPES:
        q, k, v = (torch.randn(shape) for _ in range(3))
        ours, peer = tessera.attention(q, k, v, layout="bhsd").out, sdpa(q, k, v)
        assert torch.allclose(ours, peer, atol=1e-5)
        t = medians(
            {"peer": lambda: sdpa(q, k, v), "ours": lambda: tessera.attention(q, k, v, layout="bhsd").out}, rounds
        )
        row(f"forward {shape}", t["ours"], t["peer"])
        x = [a.clone().requires_grad_() for a in (q, k, v)]
        g = torch.randn(shape)
        grad = torch.autograd.grad
        t = medians(
            {
                "peer": lambda: grad(sdpa(*x), x, g),
                "ours": lambda: grad(tessera.attention(*x, layout="bhsd").out, x, g),
            },
            rounds,
        )
        row(f"forward and backward {shape}", t["ours"], t["peer"])
    where(rounds)


def where(rounds):
    q, k, v = (torch.randn(SHAPES[1]) for _ in range(3))
    made = tessera.attention(q, k, v, layout="bhsd")
    key = tuple(Options(layout="bhsd"))
    arrays = (q, k, v, *[None] * 13)
    call = forward_caller(key)
    run = tessera.plan(q, k, v, layout="bhsd")._caller.call
    bound = (q, k, v, made.out)
    eager = tessera.calls.bridge().attention
    t = medians(
        {
            "arrays read, plan found, kernel run": lambda: run(bound, 0, 0, None),
            "and the result allocated": lambda: call(arrays, 0, 0, None),
            "and torch asked about gradients": lambda: eager(key, 0, 0, arrays),
            "the whole call": lambda: tessera.attention(q, k, v, layout="bhsd"),
            "(torch.empty_strided alone)": lambda: torch.empty_strided(SHAPES[1], (256, 128, 16, 1)),
        },
        rounds,
    )
    print(f"\nWhere the microseconds of a forward go {SHAPES[1]}:\n\n| up to here | µs |\n| --- | --- |")
    for name, quarters in t.items():
        print(f"| {name} | {quarters[1]:.2f} |")


if __name__ == "__main__":
    main()

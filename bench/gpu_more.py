#!/usr/bin/env python3
"""Backward, wide heads, biases and keep masks on this machine's GPU beside torch's SDPA: FlashAttention-2, and where a mask
is given its memory-efficient backend, by the portable kernels. Measured as bench/gpu_peers.py measures.

    python bench/gpu_more.py [--rounds N]
"""

import argparse
import statistics

import torch
import torch.nn.functional as F
from gpu_peers import race
from torch.nn.attention import SDPBackend, sdpa_kernel

import tessera

PORTABLE = "cuda.portable,cuda.portable_backward"
FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION


def tensors(batch, heads, length, dim, grad=False):
    make = lambda: torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=grad)  # noqa: E731
    return make(), make(), make()


def sdpa(backend, q, k, v, **options):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)


def agree(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        difference = (one.float() - other.float()).abs().max().item()
        assert difference < 0.05, f"results differ by {difference}"


def backward(batch, heads, length, dim, causal):
    inputs = tensors(batch, heads, length, dim, grad=True)
    dout = torch.randn_like(inputs[0])
    outs = {
        "tessera": tessera.attention(*inputs, mask="causal" if causal else None, kernels=PORTABLE).out,
        "peer": sdpa(FLASH, *inputs, is_causal=causal),
    }
    calls = {n: lambda out=out: torch.autograd.grad(out, inputs, dout, retain_graph=True) for n, out in outs.items()}
    agree(calls["tessera"](), calls["peer"]())
    return calls, 10 * batch * heads * length**2 * dim / (2 if causal else 1)


def wide(batch, heads, length, dim, causal):
    q, k, v = tensors(batch, heads, length, dim)
    calls = {
        "tessera": lambda: tessera.attention(q, k, v, mask="causal" if causal else None, kernels=PORTABLE).out,
        "peer": lambda: sdpa(FLASH, q, k, v, is_causal=causal),
    }
    agree([calls["tessera"]()], [calls["peer"]()])
    return calls, 4 * batch * heads * length**2 * dim / (2 if causal else 1)


def masked(batch, heads, length, dim, kind):
    q, k, v = tensors(batch, heads, length, dim)
    if kind == "bias":
        mask = torch.randn(1, heads, length, length, device="cuda", dtype=q.dtype)
        ours = lambda: tessera.attention(q, k, v, bias=mask).out  # noqa: E731
    else:
        mask = torch.rand(batch, 1, length, length, device="cuda") < 0.7
        ours = lambda: tessera.attention(q, k, v, mask=tessera.Mask.keep(mask)).out  # noqa: E731
    whole = mask.expand(batch, heads, length, length)
    calls = {"tessera": ours, "peer": lambda: sdpa(EFFICIENT, q, k, v, attn_mask=whole)}
    agree([calls["tessera"]()], [calls["peer"]()])
    return calls, 4 * batch * heads * length**2 * dim


def rows():
    for dim in (128, 64):
        for length in (1024, 4096, 16384):
            for causal in (False, True):
                name = f"backward {dim} {'causal' if causal else 'full'} {length}"
                yield name, "FlashAttention-2", backward, (16384 // length, 2048 // dim, length, dim, causal)
    for length in (1024, 4096):
        for causal in (False, True):
            name = f"forward 256 {'causal' if causal else 'full'} {length}"
            yield name, "FlashAttention-2", wide, (16384 // length, 8, length, 256, causal)
    for kind in ("bias", "keep"):
        for dim in (128, 64):
            yield f"forward {dim} {kind} 2048", "efficient", masked, (8, 2048 // dim, 2048, dim, kind)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    a = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; bf16, 16k tokens, hidden 2048; TFLOP/s\n")
    print("| pass, dim, mask, length | Tessera | peer | | Tessera / peer | spread |\n| --- | --- | --- | --- | --- | --- |")
    for name, peer, make, shape in rows():
        calls, flops = make(*shape)
        times = race(calls, a.rounds)
        speed = {n: flops / statistics.median(t) * 1e-12 for n, t in times.items()}
        ratios = [p / t for p, t in zip(times["peer"], times["tessera"])]
        print(
            f"| {name} | {speed['tessera']:.0f} | {speed['peer']:.0f} | {peer} | {speed['tessera'] / speed['peer']:.2f} "
            f"| {min(ratios):.2f} to {max(ratios):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

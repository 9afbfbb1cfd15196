"""What a GPU must show once, beside `tessera check` and python/tests/test_cuda.py: that no call sees the one before it, offsets
past 2^32, grids past 65535, the closed answers of the failure cases, streams, threads, devices, workspaces and repeated bits.
docs/gpu/CASES.md says which case is proven by what. Run by `scripts/gpu-test proofs`; takes 80 GB of a GPU's memory.

TESSERA_PROOF_DEVICE=cpu runs the same tests, with small numbers, on the processor: a test of the tests.
"""

import contextlib
import json
import math
import os
import random
import re
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")
from proof import (  # noqa: E402, F401 - give_back is a fixture of every test
    answered, assert_close, assert_same, by_each, Case, DEVICE, FAR, give_back, gpu_only, ints_of, KERNELS, ON_GPU,
    reference, skip_if_proven, synchronize,
)

import tessera  # noqa: E402
from tessera import _tessera  # noqa: E402
from tessera.problem import NAMES  # noqa: E402

# ------------------------------------------------------------------------------------- no call sees the one before it

# A problem, and words that change one thing of it each; "kernels" instead of a word asks for another kernel.
PAIRS = {
    "forward bf16 b2 h4/2 q70 k90 d64 mask=causal": (
        "nolse max out=f32 f16 f32 h4/4 h4/1 d128 d256 d40 d64/128 q71 k92 b3 batch_invariant kernels scale=0.3 softcap=15 "
        "sink alibi bias=1,h,q,k bias=b,1,1,k mask=none mask=causal@top_left mask=causal@at(7) mask=window(20,5) "
        "mask=chunk(33) mask=prefix(9) mask=causal&window(20,0)&first(3) mask=keep mask=causal&exclude_keys "
        "mask=documents layout=bhsd layout=qkv "
        "strides=q[26880,64,4480,1] strides=out[17920,256,64,1]lse[400,1,100,1] seqused=k[40,90] seqused=q[70,9] align=8"
    ),
    "backward bf16 b2 h4/2 q70 k90 d64 mask=causal": (
        "f16 f32 h4/4 h4/1 h6/2 d128 d40 d64/128 q71 k91 b3 deterministic kernels scale=0.3 softcap=15 sink alibi bias=1,h,q,k "
        "mask=none mask=window(20,5) mask=keep mask=causal&exclude_keys dlse layout=bhsd strides=dk[11520,64,5760,1] "
        "seqused=k[40,90] varlen=q[70,1]k[90,90] varlen=q[70,70]k[90,3] dropout=0.5@seed1"
    ),
    "backward bf16 b2 h4/2 q70 k90 d64 varlen=q[70,33]k[90,41]": "varlen=q[70,34]k[90,41] deterministic rows=q200k300 kernels",
    "backward bf16 b2 h4/2 q70 k90 d64 dropout=0.5@seed1": (
        "dropout=0.5@seed2 dropout=0.5@seed1@offset1 dropout=0.25@seed1 dropout=0.5@seed1@offset4294967296 deterministic"
    ),
    "decode bf16 b2 h4/2 q3 k90 d64 n3 append page=16 cache_lens=[50,87] mask=causal": (
        "page=32 page=1 cache_lens=[51,87] kv=e4m3:head rotary=16 rotary=16:interleaved left_pad=[2,0] v_in_k layout=bhsd f32 "
        "h4/1 h12/2 q1 n1 mask=window(20,0) k4000 sink softcap=15 slots=96 d128 out=f32 nolse batch_invariant"
    ),
    "append bf16 b2 h2 k90 d64 n3 cache_lens=[50,87]": "page=16 n2 rotary=16 kv=e4m3:head cache_lens=[50,86] h1 layout=kv",
}  # fmt: skip


def kind(word):
    if word in ("bf16", "f16", "f32"):
        return "dtype"
    return word[0] if re.fullmatch(r"[bhqknd]\d.*", word) else word.split("=")[0]


def changed(line, word):
    words = [w for w in line.split() if kind(w) != kind(word)]
    return " ".join([words[0], word, *words[1:]])


def pairs():
    for kernels in KERNELS[:-1]:
        for base, words in PAIRS.items():
            for word in words.split():
                other = (base, KERNELS[-1]) if word == "kernels" else (changed(base, word), kernels)
                yield pytest.param((base, kernels), other, id=f"{base.split()[0]} {word} {kernels}")


def problems():
    return sorted({problem for pair in pairs() for problem in pair.values})


def digest(problem):
    line, kernels = problem
    return Case(line).run(kernels).digest()


ORDERS = {
    "in order": lambda: problems(),
    "from the last": lambda: problems()[::-1],
    "each twice, shuffled": lambda: random.Random(1).sample(problems() * 2, 2 * len(problems())),
}


@pytest.fixture(scope="session")
def alone():
    """The digest of each problem in a process of its own beside no, other and the same problems, which all must agree."""
    known = {}
    for order in ORDERS:
        run = subprocess.run([sys.executable, __file__, order], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        for line, kernels, made in json.loads(run.stdout):
            assert known.setdefault((line, kernels), made) == made, (order, line, kernels)
    return known


@pytest.mark.parametrize(("one", "other"), list(pairs()))
def test_H05_L01_A14_calls_do_not_see_each_other(one, other, alone):
    """Two problems that differ in one thing, in turns: each has the bits that it has in a process of its own."""
    for problem in (one, other, one, other, one, other, other, one, one):
        assert digest(problem) == alone[problem], problem


# ------------------------------------------------------------------------------------------ far offsets, large grids

FORWARD = "forward bf16 b3 h4/2 q70 k90 d64 bias=b,h,q,k mask=causal&keep"
BACKWARD = "backward bf16 b3 h4/2 q70 k90 d64 mask=causal dlse"
WITH_PAIRS = "backward bf16 b3 h4/2 q70 k90 d64 bias=b,h,q,k mask=causal&keep"
CACHE = "decode bf16 b3 h4/2 q3 n3 k90 d64 append cache_lens=[50,87,0] mask=causal"
PAGED = "decode bf16 b3 h4/2 q3 n3 k90 d64 append page=16 cache_lens=[50,87,0] mask=causal"
FAR_OPERANDS = {
    FORWARD: ("q", "k", "v", "out", "lse", "bias", "keep"),
    BACKWARD: ("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv"),
    WITH_PAIRS: ("bias", "keep", "dbias", "q", "k", "dq", "dk"),
    CACHE: ("k", "v", "k_new"),
    PAGED: ("k", "v"),
}


def far_steps():
    for line, names in FAR_OPERANDS.items():
        operands = _tessera.Problem(line).operands()
        for name in names:
            for axis in range(4):
                if operands[name][1][axis] > 1:
                    label = f"{line.split()[0]} {'paged ' if line == PAGED else ''}{name}.{axis}"
                    yield pytest.param(line, name, axis, id=label)


def far_strides(extents, axis):
    """Dense but for `axis`, whose last index begins at FAR or just behind it."""
    strides, step = [0] * 4, 1
    for d in reversed([d for d in range(4) if d != axis]):
        strides[d] = step
        step *= extents[d]
    strides[axis] = max(step, FAR // (extents[axis] - 1) // 64 * 64 + 64)
    return strides


@by_each
@pytest.mark.parametrize(("line", "name", "axis"), list(far_steps()))
def test_D_far_strides_change_no_bit(line, name, axis, kernels):
    """D03, D09, D11, E02 to E06: each operand's each dimension, 2^32 elements long, gives the bits of a dense one, and in
    2^32 elements nothing else is written."""
    near = Case(line)
    strides = far_strides(near.operands[name][1], axis)
    far_line = f"{line} strides={name}{strides}".replace(", ", ",")
    skip_if_proven(far_line, kernels)
    far = Case(far_line, like=near).run(kernels)
    near.run(far.plan.kernel)
    assert_same(far.bits(), near.bits())
    if "dq" in far.results:
        torch.testing.assert_close(far.arrays["dq"], near.arrays["dq"], atol=2e-2, rtol=2e-2)
    if name in far.results or name in far.updates:
        assert far.nothing_else_written(name)


def test_D09_pages_far_apart():
    """Page ids up to 2^31 - 2, in a pool of 2^34 elements: the bits of a small pool, and no other slot is written."""
    far, pages = (2**31 - 1, 64) if ON_GPU else (2**16, 64)
    ids = [(7919 * n) % pages for n in range(pages)]
    line = "decode bf16 h2/1 q1 n64 k64 d8 append v_in_k page=1 cache_lens=[0]"
    made = []
    for most in (pages, far):
        table = [n * (most - 1) // (pages - 1) for n in ids]
        case = Case(f"{line} pages={most} page_table={table}".replace(", ", ","), given={"k": torch.empty(0)})
        case.place("k", torch.bfloat16, *case.operands["k"][1:])  # not filled: 34 GB
        case.arrays["v"] = case.arrays["k"]
        case.run()
        pool = case.arrays["k"][torch.tensor(table, device=DEVICE)]
        made.append({"out": ints_of(case.arrays["out"]), "slots": ints_of(pool), "new": ints_of(case.arrays["k_new"])})
        assert torch.equal(made[-1]["slots"].flatten(), made[-1]["new"].flatten())
        ints_of(case.arrays["k"])[torch.tensor(table, device=DEVICE)] = -1
        assert all((part == -1).all() for part in case.storage["k"].view(torch.int64).split(2**30))
    assert_same(*made)


LARGE = (  # case, line; judged in float64
    ("D02", "backward bf16 h1 q4194241 k70 d64"),
    ("D02", "backward bf16 h2/1 q4194241 k70 d16"),
    ("D02", "forward bf16 h2/1 q70 k4194241 d64"),
    ("D02", "backward bf16 h1 q70 k4194241 d64"),
    ("D02", "forward f32 h1 q4194241 k70 d16 mask=causal"),
    ("D02", "backward bf16 b70000 h1 q1 k3 d64"),
    ("D02", "backward f16 b70000 h2/1 q3 k2 d16 mask=causal"),
    ("D02", "backward bf16 h70000 q3 k5 d64"),
    ("D02", "backward f32 h140000/70000 q2 k3 d8"),
    ("D03", "forward f16 h1 q65537 k65537 d16 bias=1,1,q,k"),
    ("D03", "forward f16 h1 q65537 k65538 d64 bias=1,1,q,k"),
    ("D03", "forward bf16 h1 q4097 k70 d64 mask=keep strides=keep[0,0,1048576,1]"),
    ("D04", "backward bf16 h3 q46352 k46352 d128 mask=keep"),
    ("D04", "backward bf16 h8 q49999 k49999 d64 mask=keep(1,1,q,k)"),
    ("D05", "forward bf16 h32 q8192 k8192 d64 bias=1,h,q,k"),
    ("D11", "forward bf16 h1 q524288 k8192 d64 mask=keep(1,1,q,k)"),
    ("D15", "forward f32 h1 q33728 k33728 d512"),
    ("A15", "forward bf16 h1 q131072 k131072 d64 mask=keep(1,1,q,k)"),
    ("A07", "forward f16 h8 q16384 k16384 d128 mask=causal"),
    ("B11", "forward f16 h1 q70 k65536 d64"),
    ("D13", "backward f32 h1 q65600 k16 d16 dropout=0.5@seed2"),
    ("D13", "backward f32 h1 q16 k65600 d16 dropout=0.5@seed2"),
    ("D13", "backward bf16 b2 h2/1 q16400 k40 d64 dropout=0.25@seed3@offset4294967297"),
)  # fmt: skip


def sized(line):
    """On a processor numbers of four digits become small ones, unlike each other as before."""
    return line if ON_GPU else re.sub(r"(?<=[bhqk/\[,])\d{4,}", lambda m: str(int(m[0]) % 70000 % 127 + 6), line)


@by_each
@pytest.mark.parametrize(("case", "line"), LARGE)
def test_large(case, line, kernels):
    """A07, A15, B11, D02 to D05, D11, D13, D15: grids past 65535, masks and biases past 2^31 elements, far rows of dropout's mask."""
    line = sized(line)
    skip_if_proven(line, kernels)
    c = Case(line)
    drop, p = None, c.problem
    if p.dropout:
        sizes = {"batch": p.batch, "heads": p.heads_q, "rows": p.len_q, "keys": p.len_k}
        kept = tessera.dropout_mask(p.dropout, seed=p.seed, offset=p.offset, **sizes)
        drop = torch.from_numpy(kept).to(DEVICE).double() / (1 - p.dropout)
    c.run(kernels)
    assert_close(c.arrays, reference(c.arrays, causal="causal" in line, drop=drop))
    assert all(torch.equal(c.storage[n][-64:], torch.full_like(c.storage[n][-64:], 0xFF)) for n in c.results)


@pytest.mark.parametrize(
    ("line", "places"),
    (
        ("backward bf16 b2 h128 q131072 k64 d128", ((0, 0), (0, 127), (1, 63), (1, 127))),
        ("backward bf16 b16385 h8 q128 k128 d128", ((0, 0), (8191, 7), (16383, 5), (16384, 7))),
    ),
)
def test_D07_scratch_past_32_bits(line, places):
    """The sums of dQ, 2^31 elements and more: some (batch, head) pairs are as they are alone."""
    if not ON_GPU:
        line, places = "backward bf16 b2 h8 q100 k64 d128", ((0, 0), (0, 7), (1, 3), (1, 7))
    whole = Case(line).run()
    one = re.sub(r" b\d+ h\d+", " b1 h1", line)
    for b, h in places:
        mine = {n: x[b : b + 1, :, h : h + 1] for n, x in whole.arrays.items()}
        part = Case(one, given={n: mine[n].contiguous() for n in ("q", "k", "v", "out", "lse", "dout")})
        part.run(whole.plan.kernel)
        for n in ("dk", "dv"):
            assert torch.equal(ints_of(mine[n].contiguous()), ints_of(part.arrays[n])), n
        torch.testing.assert_close(mine["dq"], part.arrays["dq"], atol=1e-3, rtol=2e-2)


def test_D12_packed_keys_past_32_bits():
    """Packed K and V of more than 2^31 elements: each sequence in float64."""
    long = 2097152 if ON_GPU else 3000
    c = Case(f"forward bf16 h8 d128 varlen=q[16,70]k[{long},100]").run()
    for q, k in (slice(0, 16), slice(0, long)), (slice(16, 86), slice(long, long + 100)):
        part = {n: c.arrays[n][:, k if n in ("k", "v") else q] for n in ("q", "k", "v", "out", "lse")}
        assert_close(part, reference(part))


@pytest.mark.parametrize(
    "line",
    (
        "append bf16 b70000 h1 n1 k4 d64",
        "append bf16 b2 h70000 n1 k4 d8 page=2",
        "append f32 b70000 h2 n2 k3 d8 page=1",
    ),
)
def test_D02_appends_of_many(line):
    """More sequences or heads than 65535: the new slots hold the new tokens, all others what they held."""
    c = Case(sized(line))
    before, p = c.arrays["k"].clone(), c.problem
    c.run()
    slots = torch.arange(p.len_k, device=DEVICE).expand(p.batch, -1)
    if p.page_size:
        table = c.arrays["page_table"].flatten(1)[:, : -(-p.len_k // p.page_size)].long()
        planes, rows = table.gather(1, slots // p.page_size), slots % p.page_size
    else:
        planes, rows = torch.arange(p.batch, device=DEVICE)[:, None].expand_as(slots), slots
    before[planes[:, -p.len_new :], rows[:, -p.len_new :]] = c.arrays["k_new"]
    assert torch.equal(ints_of(c.arrays["k"]), ints_of(before))


@by_each
@pytest.mark.parametrize(
    "line",
    ("decode bf16 b70000 h2/1 q1 k5 d64", "decode bf16 h70000 q1 k5 d64", "decode bf16 b2 h1 q1 k524288 d64"),
)
def test_D02_decodes_of_many(line, kernels):
    """More sequences, heads or keys than 65535, also split and joined."""
    c = Case(sized(line)).run(kernels)
    assert_close(c.arrays, reference(c.arrays))


# ------------------------------------------------------------------------------------------------ geometry, in tables


@by_each
@pytest.mark.parametrize(
    "dims",
    "1 2 7 8 40 56 59 63 64 72 80 88 96 112 120 128 132 160 192 224 256 320 512 576 "
    "192/128 64/128 64/512 576/512 128/64 16/48".split(),
)
def test_F07_F08_I09_dims(dims, kernels):
    """Forward and backward of every dim, none of which is a tile's."""
    c = Case(f"backward bf16 b2 h4/2 q65 k97 d{dims} mask=causal").run(kernels)
    assert_close(c.arrays, reference(c.arrays, causal=True))


@pytest.mark.parametrize("page", (1, 2, 3, 8, 16, 17, 64, 128, 256))
def test_G01_G14_page_sizes(page):
    """Keys around the page's size, the last page full or not: the bits of keys that lie in a row."""
    for keys in sorted({1, max(1, page - 1), page, page + 1, 257}):
        paged = Case(f"decode bf16 b2 h4/2 q1 k{keys} d64 page={page}")
        table, slots = paged.arrays["page_table"].flatten(1).long(), torch.arange(keys, device=DEVICE)
        rows = {n: paged.arrays[n][table[:, slots // page], slots % page] for n in ("k", "v")}
        dense = Case(f"decode bf16 b2 h4/2 q1 k{keys} d64")
        for n in rows:
            dense.arrays[n].copy_(rows[n])
        paged.run(KERNELS[-1])
        dense.run(KERNELS[-1])
        assert_same(paged.bits(), dense.bits())
        assert_close(dense.arrays, reference(dense.arrays))


@pytest.mark.parametrize(
    "line", ("decode bf16 h1 q1 k131072 d64 kv=e4m3:head", "decode bf16 b2 h16/2 q1 k5000 d128 kv=e4m3:head")
)
@pytest.mark.parametrize("peak", (0.0, 1.0, 30.0))
def test_M01_M02_quantised_keys(line, peak):
    """e4m3 keys and values with scales, uniform and peaked: as their dequantised values."""
    c = Case(sized(line))
    c.arrays["q"].mul_(peak)
    c.run()
    exact = dict(c.arrays)
    for n in ("k", "v"):
        exact[n] = c.arrays[n].float().double() * c.arrays[n + "_scale"].double()
    assert_close(c.arrays, reference(exact))


# ------------------------------------------------------------------------------------------------------ closed answers


@by_each
def test_A12_neighbouring_blocks_without_keys(kernels):
    """Query blocks 3 and 4 belong to no document, and several sequences in a row are empty: it ends, and they are empty."""
    c = Case("forward f16 h1 q1024 k1024 d64 mask=documents")
    block = torch.arange(1024, device=DEVICE) // 128
    c.arrays["documents_k"].view(-1).copy_(block)
    c.arrays["documents_q"].view(-1).copy_(block.masked_fill((block == 3) | (block == 4), -1))
    c.arrays["q"].zero_()
    c.arrays["v"].copy_(block.view(1, -1, 1, 1).expand_as(c.arrays["v"]))
    c.run(kernels)
    empty = (block == 3) | (block == 4)
    assert torch.equal(c.arrays["out"][0, :, 0, 5], block.masked_fill(empty, 0).half())
    expected = torch.full((1024,), math.log(128), device=DEVICE).masked_fill(empty, -math.inf)
    torch.testing.assert_close(c.arrays["lse"].view(-1), expected, atol=1e-5, rtol=0)


@by_each
@pytest.mark.parametrize("rubbish", (math.nan, math.inf, 3e38))
def test_B01_B03_C12_rubbish_past_the_used_keys(rubbish, kernels):
    """Bit for bit the results of zeros there, with splits and without, and in backward."""
    for line in (
        "forward bf16 b4 h8 q1 k128 d64 seqused=k[32,64,96,48]",
        "forward bf16 b1 h8/1 q1 k128 d64 seqused=k[100]",
        "forward bf16 b1 h8/1 q1 k5000 d64 seqused=k[4321]",
        "backward bf16 b2 h2 q64 k64 d64 seqused=q[10,64]k[64,20] deterministic",
        "backward bf16 b2 h2 q64 k64 d64 seqused=q[10,64]k[64,20]",
    ):
        made = []
        for value in (0, rubbish):
            c = Case(line)
            for side, names in (("q", ("q", "dout")), ("k", ("k", "v"))):
                for b, n in enumerate(c.problem.values(NAMES["seqused_" + side])):
                    for name in names:
                        if name in c.arrays:
                            c.arrays[name][b, n:] = value
            if "dout" in c.arrays:
                c.attend(kernels)
            made.append(c.run(kernels).bits())
        assert_same(*made)


@pytest.mark.parametrize("dims", ("64", "576/512"))
def test_B02_G04_rubbish_in_pages_and_tables(dims):
    """NaN past the last key and in pages of nobody; ids past the last page are -1, INT_MAX, or another's page of NaN."""
    line = f"decode bf16 b2 h4/1 q1 k16 d{dims} page=4 pages=12 page_table=[9,0,3,7,5,2,8,8] cache_lens=[13,6]"
    made = []
    for value, tails in ((0, (7, 8, 8)), (math.nan, (7, 8, 8)), (math.nan, (7, -1, 2**31 - 1)), (math.nan, (7, 0, 9))):
        c = Case(line)
        used = torch.zeros(c.arrays["k"].shape[:2], dtype=torch.bool, device=DEVICE)
        for b, (pages, length) in enumerate((((9, 0, 3, 7), 13), ((5, 2), 6))):
            for t in range(length):
                used[pages[t // 4], t % 4] = True
        for n in ("k", "v"):
            c.arrays[n][~used] = value
        c.arrays["page_table"].view(2, 4).copy_(torch.tensor([[9, 0, 3, tails[0]], [5, 2, *tails[1:]]]))
        made.append(c.run().bits())
    for other in made[1:]:
        assert_same(made[0], other)


@by_each
@pytest.mark.parametrize("mask", ("causal", "window(9,3)", "keep(1,1,q,k)"))
def test_B04_a_bad_key_stays_with_the_rows_that_see_it(mask, kernels):
    """A NaN or infinity in K: not a bit of the other rows changes, whatever tile they share; those that see NaN are NaN."""
    line = f"forward bf16 h2 q70 k80 d64 mask={mask}"
    clean = Case(line).run(kernels)
    at, j = torch.arange(70, device=DEVICE)[:, None] + 10, torch.arange(80, device=DEVICE)
    sees = (
        j <= at if mask == "causal" else (at - 9 <= j) & (j <= at + 3) if "window" in mask else clean.arrays["keep"][0, 0]
    )
    for key in (0, 21, 69, 79):
        for value in (math.nan, math.inf):
            c = Case(line)
            c.arrays["k"][0, key, 0, 3] = value
            c.run(kernels)
            assert torch.equal(ints_of(c.arrays["out"])[:, ~sees[:, key]], ints_of(clean.arrays["out"])[:, ~sees[:, key]])
            assert math.isinf(value) or c.arrays["out"][0, sees[:, key], 0].isnan().all()
            assert torch.equal(ints_of(c.arrays["out"])[:, :, 1], ints_of(clean.arrays["out"])[:, :, 1])


@by_each
@pytest.mark.parametrize("sink", (0, -1000, 1000, -3.4e38, -math.inf))
def test_B04_rows_without_keys_keep_their_sink_beside_a_bad_value(sink, kernels):
    """Ten rows of a tile see nothing, and V is NaN where the others see it: out is 0 and lse the sink all the same."""
    c = Case("forward bf16 h1 q70 k80 d64 mask=causal@at(-10) sink")
    c.arrays["v"][0, 0] = math.nan
    c.arrays["sinks"].fill_(sink)
    c.run(kernels)
    assert not c.arrays["out"][0, :10].float().any()
    assert (c.arrays["lse"][0, 0, :10] == sink).all()


@by_each
def test_B05_no_finite_stand_in_for_minus_infinity(kernels):
    """However low a score is, a masked key weighs nothing beside it; a bias of -3e38 is a bias."""
    c = Case("forward f32 h1 q2 k2 d1 scale=1 mask=keep")
    for name, values in (("q", (-20000, 0)), ("k", (1, 0)), ("v", (1, 100)), ("keep", (True, False, True, False))):
        c.arrays[name].copy_(torch.tensor(values).view(c.arrays[name].shape))
    assert c.run(kernels).arrays["out"].flatten().tolist() == [1, 1]
    low = Case("forward f32 h1 q1 k1 d1 scale=1")
    for name, value in (("q", -5e5), ("k", 1), ("v", 7)):
        low.arrays[name].fill_(value)
    low.run(kernels)
    assert low.arrays["out"].item() == 7 and abs(low.arrays["lse"].item() + 5e5) < 0.1
    for dtype in ("f32", "bf16"):
        biased = Case(f"forward {dtype} h1 q2 k2 d64 bias=1,1,q,k mask=causal")
        biased.arrays["q"].zero_()
        biased.arrays["v"].copy_(torch.tensor([3.0, 9]).view(1, 2, 1, 1).expand_as(biased.arrays["v"]))
        biased.arrays["bias"].copy_(torch.tensor([-3e38, 0, -3e38, 0]).view(1, 1, 2, 2))
        assert biased.run(kernels).arrays["out"][0, :, 0, 63].tolist() == [3, 9]


@by_each
@pytest.mark.parametrize("dtype", ("bf16", "f32"))
def test_B07_B09_whole_tiles_of_minus_infinity(dtype, kernels):
    """A bias of -inf but for a band far from the first keys, for one last key, for none."""
    c = Case(f"forward {dtype} h1 q640 k640 d64 bias=1,1,q,k")
    i = torch.arange(640, device=DEVICE)
    band = (i[None] <= i[:, None]) & (i[None] >= i[:, None] - 9)
    for name in ("q", "k", "v"):
        c.arrays[name].fill_(1)
    c.arrays["bias"].copy_(torch.zeros(640, 640, device=DEVICE).masked_fill(~band, -math.inf)[None, None])
    c.run(kernels)
    torch.testing.assert_close(c.arrays["out"].float(), torch.ones(1, 640, 1, 64, device=DEVICE), atol=1e-6, rtol=0)
    torch.testing.assert_close(c.arrays["lse"][0, 639].item(), 8 + math.log(10), atol=1e-5, rtol=0)
    late = Case(f"forward {dtype} h1 q3 k130 d64 bias=1,1,1,k scale=1e-30")
    late.arrays["bias"].fill_(-math.inf)[..., 129] = 0
    late.run(kernels)
    assert torch.equal(late.arrays["out"], late.arrays["v"][:, 129:].expand_as(late.arrays["out"]))
    assert late.arrays["lse"].abs().max() < 1e-6
    late.arrays["bias"].fill_(-math.inf)
    late.run(kernels)
    assert not late.arrays["out"].any() and late.arrays["lse"].isneginf().all()


@by_each
def test_B10_scores_beyond_float16(kernels):
    """Scores of 741455: the result is the first value, lse that number."""
    c = Case("forward f16 h1 q2 k2 d128")
    c.arrays["q"].fill_(256)
    c.arrays["k"].copy_(torch.tensor([256, 255.5]).view(1, 2, 1, 1).expand_as(c.arrays["k"]))
    c.run(kernels)
    assert torch.equal(c.arrays["out"], c.arrays["v"][:, :1].expand_as(c.arrays["out"]))
    torch.testing.assert_close(c.arrays["lse"][0, 0].item(), 256 * 256 * math.sqrt(128), atol=0.2, rtol=0)


@by_each
@pytest.mark.parametrize("dtype, q, k", (("bf16", 19968, 22016), ("bf16", 59904, 66048), ("f16", 9000, 11072), ("f16", 20000, 22000)))
def test_B10_scores_whose_product_with_the_scale_is_rounded_by_hundreds(kernels, dtype, q, k):
    """Scores to 3e10, whose last digit is worth hundreds as a power of 2: a row of equal keys returns v, and so does one whose
    other keys lie far below, first or last."""
    for keys, below in ((1, ()), (200, ()), (200, (0,)), (200, (199,))):
        c = Case(f"forward {dtype} h1 q3 k{keys} d64")
        c.arrays["q"].fill_(q)
        c.arrays["k"].fill_(k)
        c.arrays["v"].fill_(1.5)
        for n in below:
            c.arrays["k"][:, n] = -k
            c.arrays["v"][:, n] = 7
        c.run(kernels)
        assert (c.arrays["out"] == 1.5).all()
        z = float(c.arrays["q"][0, 0, 0, 0]) * float(c.arrays["k"][0, 1 if below else 0, 0, 0]) * 8
        torch.testing.assert_close(c.arrays["lse"].max().item(), z, atol=0, rtol=1e-6)


@by_each
def test_B11_sums_beyond_float16(kernels):
    """65536 keys of value 2 sum to 131072 before they are divided."""
    for line in ("forward f16 h1 q1 k65536 d64", "forward f16 h1 q70 k65536 d64", "decode f16 h1 q1 k65536 d64 page=16"):
        c = Case(line)
        c.arrays["q"].zero_()
        c.arrays["v"].fill_(2)
        c.run(kernels)
        assert (c.arrays["out"] == 2).all()
        torch.testing.assert_close(c.arrays["lse"].max().item(), math.log(65536), atol=1e-5, rtol=0)


@by_each
def test_H01_one_base_on_every_path(kernels):
    """lse is the natural logarithm, dense, split, paged, packed: parts of 3072 and 64 keys join with a weight of 1 in 49."""
    for line in (
        "forward bf16 h2 q{} k{} d64",
        "forward f32 h2 q{} k{} d40",
        "decode bf16 h2 q{} k{} d64 page=16",
        "forward bf16 h2 d64 varlen=q[{}]k[{}]",
    ):
        for rows in (1, 70):
            lse = []
            for keys in (3072, 64):
                c = Case(line.format(min(rows, keys), keys))
                c.arrays["q"].zero_()
                lse.append(c.run(kernels).arrays["lse"].min().item())
                torch.testing.assert_close(lse[-1], math.log(keys), atol=1e-5, rtol=0)
            assert abs(math.exp(lse[1]) / sum(map(math.exp, lse)) - 1 / 49) < 1e-6


@by_each
@pytest.mark.parametrize("dims", ("64", "128"))
def test_H09_row_sums_of_dout_out_are_exact(dims, kernels):
    """dO . out of alternating +-100.5 by 100.5 but for one 101 is 50.25; products of 16 bits make it 64."""
    c = Case(f"backward bf16 h1 q1 k1 d{dims} scale=1")
    for name, value in (("q", 0), ("k", 1), ("v", 0), ("lse", 0), ("out", 100.5), ("dout", 100.5)):
        c.arrays[name].fill_(value)
    c.arrays["out"][..., 0] = 101
    c.arrays["dout"][..., 1::2] = -100.5
    c.run(kernels)
    assert c.arrays["dq"].float().unique().tolist() == [-50.25] and not c.arrays["dk"].any()


@by_each
def test_M05_large_sinks_and_sinks_alone(kernels):
    """A sink of 100 beside scores of 0; one of -100; one without keys."""
    for dtype in ("f32", "bf16"):
        c = Case(f"forward {dtype} h2 q3 k128 d64 sink")
        c.arrays["q"].zero_()
        c.arrays["v"].fill_(1)
        c.arrays["sinks"].copy_(torch.tensor([100.0, -100]).view(c.arrays["sinks"].shape))
        c.run(kernels)
        lse, out = c.arrays["lse"][0, :, :, 0].double(), c.arrays["out"][0, :, :, 9].double()
        expected = torch.tensor([[100, math.log(128)]] * 3, dtype=torch.float64, device=DEVICE)
        torch.testing.assert_close(lse, expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(out, torch.tensor([[0.0, 1]] * 3, device=DEVICE).double(), atol=1e-6, rtol=0)
        for line in (f"forward {dtype} h1 q3 k0 d64 sink", f"forward {dtype} h1 q3 k2 d64 sink mask=window(0,-1)"):
            empty = Case(line)
            empty.arrays["sinks"].fill_(0.5)
            empty.run(kernels)
            assert empty.arrays["lse"].flatten().tolist() == [0.5] * 3 and not empty.arrays["out"].any()


@by_each
def test_J06_dropout_is_one_mask(kernels):
    """With v and dO the identity, out is the mask by rows and dV by keys: that of tessera.dropout_mask, of every offset."""
    for offset in (0, 5, 2**32 + 1):
        c = Case(f"backward f32 b2 h2/1 q40 k40 d40 dropout=0.25@seed123456789012@offset{offset}")
        c.arrays["q"].zero_()
        for name in ("v", "dout"):
            c.arrays[name].copy_(torch.eye(40, device=DEVICE)[None, :, None].expand_as(c.arrays[name]))
        c.attend(kernels)
        c.run(kernels)
        kept = tessera.dropout_mask(0.25, seed=123456789012, offset=offset, batch=2, heads=2, rows=40, keys=40)
        mask = torch.from_numpy(kept).to(DEVICE).float() / 0.75 / 40
        torch.testing.assert_close(c.arrays["out"], mask.transpose(1, 2), atol=1e-7, rtol=0)
        torch.testing.assert_close(c.arrays["dv"][:, :, 0], mask.sum(1).mT, atol=1e-6, rtol=0)
        torch.testing.assert_close(c.arrays["lse"].min().item(), math.log(40), atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", ("", "softcap=20 alibi sink"))
@pytest.mark.parametrize("cache", ("", "page=16", "cache_lens=[300] slots=4000", "cache_lens=[300] slots=4000 page=16"))
def test_J04_J05_a_row_has_its_bits_however_it_is_asked_for(options, cache):
    """Dims 192 and 128: the last row of a prefill of 300 and a decode of one row, from caches of any kind and size."""
    head = f"bf16 h4/2 d192/128 batch_invariant mask=causal {options}"
    whole = Case(f"forward {head} q300 k300").run()
    c, slots = Case(f"decode {head} q1 k300 {cache}"), torch.arange(300, device=DEVICE)
    c.arrays["q"].copy_(whole.arrays["q"][:, 299:])
    for n in ("k", "v"):
        if "page_table" in c.arrays:
            c.arrays[n][c.arrays["page_table"].flatten()[slots // 16].long(), slots % 16] = whole.arrays[n][0]
        else:
            c.arrays[n][:, :300] = whole.arrays[n]
    assert_same(c.run().bits(), {n: ints_of(x[:, 299:].contiguous()) for n, x in whole.exact().items()})


SPOILT = (  # a number that must not be, and the bit of the status word that says so
    ("append bf16 b3 h2 n2 k9 d8 cache_lens=[7,0,3]", "cache_lens", 0, (8, 9, 2**31 - 1)),
    ("append bf16 b3 h2 n2 k9 d8 cache_lens=[7,0,3]", "cache_lens", 2, (-1, -2, -(2**31))),
    ("append bf16 b3 h2 n2 k9 d8 cache_lens=[7,4,3] left_pad=[0,4,3]", "left_pad", 1, (5, -1, 2**31 - 1)),
    ("append bf16 b3 h2 n2 k9 d8 cache_rows=5 cache_batch_idx=[4,0,2] cache_lens=[7,0,3]", "cache_batch_idx", 1, (5, -1, 2**31 - 1)),
    ("append bf16 b2 h2 n3 k12 d8 page=4 pages=7 page_table=[6,0,3,2,5,4] cache_lens=[3,9]", "page_table", 1, (7, -1, 2**31 - 1)),
    ("append bf16 h2 n2 k9 d8 varlen=n[1,2,1] b3 cache_lens=[0,5,7]", "cu_seqlens_new", 3, (5, 2, -(2**31))),
    ("append bf16 b3 h2 n2 k9 d8 seqused=n[1,2,0] cache_lens=[7,0,3]", "seqused_new", 2, (3, -1, 2**31 - 1)),
    ("append bf16 b3 h2 n2 k19 d8 rotary=6 positions=9 cache_lens=[7,0,3]", "cache_lens", 1, (8, 17)),
    ("decode bf16 b3 h2 q1 k9 d8 cache_lens=[7,1,3]", "cache_lens", 0, (10, -1, 2**31 - 1)),
    ("decode bf16 b2 h2 q1 k64 d64 page=16 pages=8 cache_lens=[64,9]", "cache_lens", 0, (65, -1, 2**31 - 1)),
    ("decode bf16 b2 h2 q1 k64 d64 page=16 pages=8 cache_lens=[64,9]", "page_table", 1, (8, -1, 2**31 - 1)),
    ("forward bf16 h2 d64 varlen=q[5,7,9]k[5,7,9]", "cu_seqlens_k", 0, (1, -1)),
    ("forward bf16 h2 d64 varlen=q[5,7,9]k[5,7,9]", "cu_seqlens_q", 3, (22, 2, 2**31 - 1)),
    ("backward bf16 b2 h2 q9 k9 d64 seqused=q[5,7]k[9,9]", "seqused_k", 0, (10, -1, 2**31 - 1)),
)  # fmt: skip


@pytest.mark.parametrize(("line", "name", "at", "values"), SPOILT)
def test_C07_C11_G05_G06_what_is_unsound_is_noted_and_not_followed(line, name, at, values):
    """The status word says so; each byte of a cache is as before or as it should become, the last sequence or the first is
    served, and no byte beside is touched."""
    with_status = line if line.startswith("backward") else line + " status"
    for value in values:
        sound, c = (Case(with_status) for _ in range(2))
        before = {n: ints_of(c.arrays[n]).clone() for n in c.updates}
        sound.run()
        c.arrays[name].view(-1)[at] = value
        if not ON_GPU:
            with pytest.raises(ValueError):
                c.run()
            continue
        c.run()
        assert "status" not in c.arrays or c.arrays["status"].item() != 0
        for n, old in before.items():
            new, right = ints_of(c.arrays[n]), ints_of(sound.arrays[n])
            assert ((new == old) | (new == right)).all() and c.nothing_else_written(n)
        served = -1 if at == 0 or name == "page_table" else 0
        for n in {"out", "dk", "dv"} & set(c.results) if "varlen" not in line else ():
            assert torch.equal(ints_of(c.arrays[n][served]), ints_of(sound.arrays[n][served])), n


# ------------------------------------------------------------------------------- streams, threads, graphs, workspaces

WORKERS = (  # splits that are joined, sums of gradients by both kernels, an append
    "decode bf16 h8/2 q1 k3000 d64 page=16",
    "forward bf16 h2 q5 k3000 d96",
    "backward bf16 b2 h4/2 q200 k300 d64 mask=causal",
    "backward bf16 b2 h4/2 q200 k300 d64 mask=causal alibi sink deterministic",
    "decode bf16 b2 h64/4 q1 n1 k400 d128 append page=16 cache_lens=[399,80]",
)
INPUTS = ("q", "k", "v", "dout", "k_new", "v_new")


def other_inputs(case):
    """The same case with q and dO negated: another problem of the same shapes."""
    other = Case(case.line, like=case)
    for name in ("q", "dout"):
        if name in other.arrays:
            other.arrays[name].neg_()
    return other


@pytest.mark.parametrize("line", WORKERS)
def test_K03_K04_runs_on_the_callers_stream(line):
    """A stream of the user's, on which the inputs come long after the call was queued."""
    c = Case(line)
    inputs = {n: c.arrays[n].clone() for n in INPUTS if n in c.arrays}
    expected = c.run().bits()
    for n, x in inputs.items():
        c.arrays[n].zero_()
    c.erase()
    stream = torch.cuda.Stream() if ON_GPU else None
    synchronize()
    with torch.cuda.stream(stream) if ON_GPU else contextlib.nullcontext():
        busy = torch.randn(4096 if ON_GPU else 64, 4096 if ON_GPU else 64, device=DEVICE)
        for _ in range(20):
            busy = busy @ busy * 1e-3
        for n, x in inputs.items():
            c.arrays[n].copy_(x)
        c.run()
    if ON_GPU:
        stream.synchronize()
    assert_same(c.bits(), expected)


@pytest.mark.parametrize("line", WORKERS)
def test_K07_two_streams_share_nothing(line):
    """100 interleaved calls of two problems of the same shapes."""
    c = [Case(line)]
    c.append(other_inputs(c[0]))
    expected = [x.run().bits() for x in c]
    streams = [torch.cuda.Stream() if ON_GPU else None for _ in c]
    differ = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in c]
    synchronize()
    for turn in range(100):
        n = turn % 2
        with torch.cuda.stream(streams[n]) if ON_GPU else contextlib.nullcontext():
            c[n].run()
            for name, x in c[n].exact().items():
                differ[n] += (ints_of(x.contiguous()) != expected[n][name]).sum()
    synchronize()
    assert [int(x) for x in differ] == [0, 0]


@pytest.mark.parametrize("line", WORKERS)
def test_K08_the_workspace_may_hold_anything(line):
    """0xFF, zeros, large numbers."""
    c = Case(line)
    made = []
    for rubbish in (-1, 0, 0x7F7F7F7F):
        c.erase()
        made.append(c.run(rubbish=rubbish).bits())
    assert_same(made[0], made[1])
    assert_same(made[0], made[2])


def test_K08_one_workspace_for_all_in_turn():
    """Forward, backward and decode leave what they like to each other."""
    memory = torch.full((2**24,), -1, dtype=torch.int32, device=DEVICE)
    cases = [Case(line) for line in WORKERS]
    expected = [c.run().bits() for c in cases]
    for _ in range(3):
        for c, bits in zip(cases, expected):
            c.erase()
            assert_same(c.run(memory=memory).bits(), bits)


def test_K09_one_plan_many_runs_one_of_them_unsound():
    """A run whose lengths were unsound leaves nothing behind."""
    c = Case("decode bf16 b2 h8/2 q1 k3000 d64 page=16 cache_lens=[3000,2000] status")
    expected = c.run().bits()
    lens = c.arrays["cache_lens"].clone()
    for _ in range(5):
        c.arrays["cache_lens"].fill_(2**31 - 1)
        with contextlib.nullcontext() if ON_GPU else pytest.raises(ValueError):
            c.run()
        c.arrays["cache_lens"].copy_(lens)
        c.arrays["status"].zero_()
        c.erase()
        assert_same(c.run().bits(), expected)
        assert c.arrays["status"].item() == 0


def test_K11_another_batch_than_planned():
    """Refused with both numbers."""
    q, k = (torch.randn(n, 16, 2, 64, device=DEVICE, dtype=torch.bfloat16) for n in (8, 9))
    plan = tessera.plan(q, q, q)
    with pytest.raises(ValueError, match=r"(?s)\b9\b.*\b8\b"):
        plan.run(q=k, k=k, v=k, out=torch.empty_like(k))


@gpu_only
@pytest.mark.parametrize("line", (*WORKERS, "forward f16 h2 q4 k0 d64 mask=causal"))
def test_K01_F04_C03_captured_and_replayed(line):
    """Nothing waits or allocates inside: what is captured before it ever ran replays on new inputs, also without keys."""
    c = Case(line)
    other = other_inputs(c)
    torch.full((1,), -1, dtype=torch.int32, device=DEVICE)  # torch's own kernel, loaded before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c.run()
    for _ in range(2):
        for name in ("q", "dout"):
            if name in c.arrays:
                c.arrays[name].neg_()
        c.erase()
        graph.replay()
    for name in ("q", "dout"):
        if name in c.arrays:
            c.arrays[name].neg_()
    c.erase()
    graph.replay()
    assert_same(c.bits(), other.run().bits())


@gpu_only
@pytest.mark.parametrize("again", range(2))
def test_K06_first_calls_of_two_threads(again):
    """A fresh process, whose two threads begin at once, with unlike sizes, on two devices if there are: the bits of calls
    one after the other."""
    run = subprocess.run([sys.executable, __file__, "threads"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def two_threads():
    lines = ("backward bf16 h2 q300 k300 d128", "backward bf16 h2 q100 k70 d64 deterministic", "forward f16 h2 q90 k90 d256")
    devices = "cuda:0", f"cuda:{torch.cuda.device_count() - 1}"
    cases = [[Case(line, device=device, given={}) for line in lines] for device in devices]
    begin, digests = threading.Barrier(2), [[], []]

    def work(n):
        begin.wait()
        for c in cases[n] if n == 0 else cases[n][::-1]:
            if "dout" in c.arrays:
                c.attend()
            c.run()
        torch.cuda.synchronize(cases[n][0].device)
        digests[n] = [c.digest() for c in cases[n]]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    after = [Case(line).run().digest() for line in lines]
    assert digests[0] == after and digests[1] == after, (digests, after)


@gpu_only
def test_I07_scratch_is_not_used_after_it_is_given_back():
    """Without torch's cache of memory: what is given back is gone."""
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    run = subprocess.run([sys.executable, __file__, "scratch"], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == scratch_digests()


def scratch_digests():
    return [Case(line).run().digest() for line in WORKERS for _ in range(3)]


# -------------------------------------------------------------------------------------------------------- two devices


@pytest.mark.skipif(not ON_GPU or torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "line", (*WORKERS, "append bf16 b2 h2 k90 d64 n3 page=16", "forward bf16 b2 h4 q200 k200 d256 mask=causal")
)
def test_K05_tensors_on_another_device_than_the_current(line):
    """They are answered where they are, with the same bits, and the current device stays."""
    first = Case(line)
    second = Case(line, like=first, device="cuda:1")
    for turn in range(2):
        assert torch.cuda.current_device() == 0
        assert_same(first.run().bits(), second.run().bits())
        assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        assert_same(first.run().bits(), second.run().bits())
        assert torch.cuda.current_device() == 1


@pytest.mark.skipif(not ON_GPU or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_K05_gradients_on_another_device():
    """Through torch's autograd, whose threads are the device's."""
    torch.manual_seed(1)
    inputs = [torch.randn(2, 130, 4, 64, device="cuda:0", dtype=torch.bfloat16) for _ in range(3)]
    grads = []
    for device in ("cuda:0", "cuda:1"):
        on = [x.to(device).requires_grad_() for x in inputs]
        out = tessera.attention(*on, mask="causal", deterministic=True).out
        grads.append(torch.autograd.grad(out, on, torch.ones_like(out)))
        assert all(x.device == torch.device(device) for x in grads[-1]) and torch.cuda.current_device() == 0
    assert all(torch.equal(a, b.to(a.device)) for a, b in zip(*grads))


# ------------------------------------------------------------------------------------------------------- repeated bits


@by_each
@pytest.mark.parametrize(
    ("times", "line"),
    (
        (1000, "forward f16 h16/2 q129 k129 d512"),  # F11
        (50, "forward bf16 b300 h1 q2048 k128 d128"),  # J07
        (50, "backward bf16 b300 h1 q2048 k128 d128"),
        (20, "backward bf16 b300 h1 q2048 k128 d128 deterministic"),
        (100, "forward bf16 b2 h8/2 q1000 k1000 d64 mask=causal"),
        (100, "forward bf16 h8/2 q1 k20000 d128"),  # splits
        (100, "decode bf16 b3 h28/4 q5 k20000 d64 page=16 mask=causal"),
        (20, "backward bf16 b2 h8/2 q1000 k1024 d64 mask=causal"),
        (20, "backward bf16 b2 h8/2 q128 k1024 d128 mask=causal deterministic"),  # J02
        (20, "backward bf16 b2 h8/2 q1024 k128 d128 mask=causal deterministic"),
        (20, "backward bf16 h4/2 d64 varlen=q[128,1024,1]k[1024,128,300] mask=causal deterministic"),
        (20, "backward f16 h4/2 q129 k129 d512"),
        (20, "backward f32 b2 h4/2 q200 k300 d64 bias=1,h,q,k alibi sink dropout=0.1@seed1 deterministic"),
    ),
)
def test_J02_J07_F11_the_same_bits_every_time(times, line, kernels):
    """Without a wait between the runs. Of the fast backward kernel dK and dV: its dQ has no fixed order."""
    skip_if_proven(line, kernels)
    c = Case(line if ON_GPU else line.replace("b300", "b3").replace("q2048", "q200").replace("k20000", "k2000"))
    first = c.run(kernels).bits()
    differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(times if ON_GPU else 3):
        c.run(kernels)
        for name, x in c.exact().items():
            differ += (ints_of(x.contiguous()) != first[name]).sum()
    assert int(differ) == 0
    assert all(x.isfinite().all() for n, x in c.exact().items())


@pytest.mark.parametrize(
    "line",
    ("forward bf16 h4/2 q16384 k16384 d512", "backward bf16 h2/1 q16384 k16384 d64 bias=1,1,1,k deterministic"),
)
def test_N06_memory_is_linear(line):
    """D = 512, and groups with an additive mask: nothing of the size of the scores, 512 MB a head, is ever taken."""
    c = Case(sized(line))
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    c.run()
    if ON_GPU:
        assert torch.cuda.max_memory_allocated() - held < 64 * 2**20
    assert c.plan.workspace_bytes < (64 if ON_GPU else 256) * 2**20


if __name__ == "__main__":
    if sys.argv[1] == "threads":
        two_threads()
    elif sys.argv[1] == "scratch":
        print(json.dumps(scratch_digests()))
    else:
        print(json.dumps([(*problem, digest(problem)) for problem in ORDERS[sys.argv[1]]()]))

"""Proofs of extents: offsets past 2^32, grids past 65535, every dim and page size, memory that is linear in them."""

import re

import pytest

torch = pytest.importorskip("torch")
from proof import (  # noqa: E402, F401 - give_back is a fixture of every test
    assert_close, assert_same, by_each, Case, DEVICE, FAR, give_back, ints_of, KERNELS, ON_GPU, reference, skip_if_proven,
)

import tessera  # noqa: E402
from tessera import _tessera  # noqa: E402

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

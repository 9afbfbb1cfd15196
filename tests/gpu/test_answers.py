"""Proofs by closed answers: empty blocks, whole tiles of -inf, sums and scores beyond float16, sinks, dropout's mask."""

import math

import pytest

torch = pytest.importorskip("torch")
from proof import by_each, Case, DEVICE, give_back  # noqa: E402, F401 - give_back is a fixture of every test

import tessera  # noqa: E402


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

"""Proofs of rubbish: past the used keys, in pages of nobody, in keys that some rows see, in lists of lengths and ids."""

import math

import pytest

torch = pytest.importorskip("torch")
from proof import (  # noqa: E402, F401 - give_back is a fixture of every test
    assert_same, by_each, Case, DEVICE, give_back, ints_of, ON_GPU,
)

from tessera.problem import NAMES  # noqa: E402


@by_each
@pytest.mark.parametrize("rubbish", (math.nan, math.inf, 3e38, 1e4))
def test_B01_B03_C12_rubbish_past_the_used_keys(rubbish, kernels):
    """Bit for bit the results of zeros there, with splits and without, and in backward."""
    for line in (
        "forward bf16 b4 h8 q1 k128 d64 seqused=k[32,64,96,48]",
        "forward bf16 b1 h8/1 q1 k128 d64 seqused=k[100]",
        "forward bf16 b1 h8/1 q1 k5000 d64 seqused=k[4321]",
        "forward bf16 b2 h2 q128 k1024 d128 seqused=q[100,0]k[0,1000] sink nolse",
        "forward bf16 b2 h2 q128 k1024 d80 seqused=q[100,70]k[1000,900]",
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
    assert (c.arrays["lse"][0, :10] == sink).all()


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

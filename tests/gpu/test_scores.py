"""Proofs of scores far from ordinary: that grow or fall with the key's place, of keys beyond all others, all far below zero,
beyond float32. scores.py makes them."""

import math

import pytest

torch = pytest.importorskip("torch")
from proof import by_each, DEVICE, give_back, ints_of  # noqa: E402, F401 - give_back is a fixture of every test
from scores import EVERY, MASKS, nearest_power, row, Scores  # noqa: E402

import tessera  # noqa: E402

by_dtype = pytest.mark.parametrize("dtype", ("bf16", "f16"))
by_mask = pytest.mark.parametrize("mask", ("none", "causal"))
# Of 128 and 192/128 few queries have their keys split among the blocks of a cluster, many have not.
SHAPES = ("d64 q300 k500", "d128 q129 k1024", "d192/128 q70 k1500", "d64 q2000 k500", "d128 q2000 k777", "d192/128 q1950 k600")
SHAPES = (*SHAPES, "d80 q200 k900", "d96 q192 k640", "d112 q140 k333", "d160 q150 k400", "d192 q257 k400", "d256 q256 k333")
by_shape = pytest.mark.parametrize("shape", SHAPES)
DIMS = ("64", "80", "96", "112", "128", "160", "192", "256", "192/128")
by_dims = pytest.mark.parametrize("dims", DIMS)

# ------------------------------------------------------------------------------------------------------- growing, falling


@by_each
@by_mask
@by_dtype
@by_shape
def test_H06_scores_that_grow_or_fall_with_the_key(shape, dtype, mask, kernels):
    """By about 1, 4, 20 and 200 powers of two in 80 keys, a head each; rows beside each other go up, down, slower, nowhere.
    For the second KV head up to the middle and down again."""
    c = Scores(f"forward {dtype} h4/2 {shape} mask={mask}", kernels)
    steps = [nearest_power(n * math.log(2) / 80 / c.scale) for n in (1, 4, 20, 200)]
    ways = torch.tensor((1, -1, 0.5, 0), device=DEVICE)[c.rows % 4]
    last = len(c.keys) - 1
    there_and_back = last - (2 * c.keys - last).abs()
    c.score(row(ways) * torch.tensor(steps, device=DEVICE), torch.cat((row(c.keys), row(there_and_back)), -1))
    c.run().judge(mask)


@by_each
@by_mask
@by_dtype
@by_shape
def test_H06_scores_that_jump(shape, dtype, mask, kernels):
    """By 0 to 1000 powers of two at a middle key, up and down: around what a base lets pass and what float32 holds."""
    c = Scores(f"forward {dtype} h4/2 {shape} mask={mask} scale={math.log(2)}", kernels)
    jumps = (0, 1, 6, 7, 8, 9, 60, 100, 116, 118, 120, 122, 124, 126, 127, 128, 129, 150, 256, 1000)
    late = row(c.keys >= len(c.keys) // 2)
    c.score(row(torch.tensor(jumps, device=DEVICE)[c.rows % len(jumps)]), torch.cat((late, 1 - late), -1))
    c.run().judge(mask)


# --------------------------------------------------------------------------------------------------------- beyond others


def places(c):
    """(batch, key, KV head): 1 at the first, a middle, the last key; at two far from each other, at neighbours; at all."""
    keys, last = torch.zeros(3, 2, len(c.keys), dtype=torch.float64, device=DEVICE), len(c.keys) - 1
    for n, at in enumerate(((0,), (last // 2,), (last,), (0, last), (last // 2, last // 2 + 1), EVERY)):
        keys[n // 2, n % 2, at] = 1
    c.dense["k"].masked_fill_(keys.transpose(1, 2)[..., None] != 0, 0)
    return keys.transpose(1, 2)


@by_each
@by_dtype
@by_shape
@pytest.mark.parametrize(
    ("score", "mask"), ((1e3, "causal"), (1e4, "none"), (1e6, "causal"), (1e9, "none"), (1e12, "causal"))
)
def test_B10_keys_beyond_all_others(score, mask, shape, dtype, kernels):
    """A key of that score has all the weight, two have half each, all share it; of minus that score it has none, and all
    share it again. Between such rows are rows for which these keys are nothing."""
    # Beyond what three digits of a key give, the scale makes it so.
    scale = "" if score < 1e9 else f"scale={nearest_power(score / 2**23)}"
    c = Scores(f"forward {dtype} b3 h4/2 {shape} mask={mask} {scale}", kernels)
    key = min(2**24 - 1, round(2 * score / c.scale))
    c.score(row(torch.tensor((0.5, -0.5, 0), device=DEVICE)[c.rows % 3]), places(c) * key)
    c.run().judge(mask)


ALL_FAR = [(1, 2907259, "none"), (1, 2907268, "causal"), (1, 10**7, "none"), (1, 10**7, "causal"), (64, 10**7, "causal")]
ALL_FAR = [*((dtype, *far) for dtype in ("bf16", "f16") for far in ALL_FAR), ("bf16", 2**76, 10**7, "none")]


@by_each
@by_shape
@pytest.mark.parametrize(("dtype", "size", "least", "mask"), ALL_FAR)
def test_B10_all_scores_far_from_zero(dtype, size, least, mask, shape, kernels):
    """Rows whose scores are all about 3e6, where bases of cuda.sm90 end, 1e7, 6e8 or 7e29, above zero or below, beside
    ordinary ones: that they differ by 0 to 22 sizes is what counts."""
    scale = 2 * size if size < 2**30 else 1
    c = Scores(f"forward {dtype} h4/2 {shape} mask={mask} scale={scale}", kernels)
    way = torch.tensor((-0.5, 0.5, 0, -0.5, 0), dtype=torch.float64, device=DEVICE)[c.rows % 5] * (2 * size / scale)
    c.score(row(way), row(least + c.keys * 7 % 23), alone=True)
    c.run().judge(mask)


# ------------------------------------------------------------------------------------------------------------ not finite


@by_each
@by_shape
@pytest.mark.parametrize(
    ("dtype", "mask", "way", "scale"),
    (("bf16", "causal", 2.0**110, ""), ("bf16", "none", 2.0**110, ""), ("f16", "causal", 0.5, f"scale={2.0**110}")),
)
def test_B10_scores_beyond_float32(dtype, mask, way, scale, shape, kernels):
    """By the product or the scale. A row that sees +inf is NaN, one that sees -inf alone is NaN or empty, or they are what
    float64 says; not a bit of other rows changes."""
    made = []
    for ways in ((way, -way, 0), (0, 0, 0)):
        c = Scores(f"forward {dtype} b3 h4/2 {shape} mask={mask} {scale}", kernels)
        keys = places(c)
        c.score(row(torch.tensor(ways, device=DEVICE)[c.rows % 3]), keys * 2**20, alone=True)
        made.append(c.run())
    c, clean = made
    for name in ("out", "lse"):
        assert torch.equal(ints_of(c.arrays[name])[:, c.rows % 3 == 2], ints_of(clean.arrays[name])[:, c.rows % 3 == 2])
    out, sees = c.arrays["out"], c.sees(mask, len(c.rows), len(c.keys))[0, 0].double()
    sees_inf, sees_more = (((sees @ x) > 0).repeat_interleave(2, -1) for x in (keys, 1 - keys))
    up, down = ((c.rows % 3 == n)[:, None] for n in (0, 1))
    nan, empty = out.isnan().all(-1), (out == 0).all(-1) & c.arrays["lse"].isneginf().all(-1)
    c.judge(mask, but=(up & sees_inf & nan) | (down & ~sees_more & (nan | empty)))


BAD_KEYS = [
    *(("h4/2 q300 k300", dims, mask) for dims in DIMS for mask in ("causal", "window(100,30)")),
    *(("h1 q128 k8192", dims, "causal") for dims in ("64", "128")),  # splits
]


@by_each
@by_dtype
@pytest.mark.parametrize(("sizes", "dims", "mask"), BAD_KEYS)
def test_B04_a_bad_key_among_far_scores(sizes, dims, mask, dtype, kernels):
    """A NaN in K: rows that see it are NaN, also those that see nothing else; not a bit of the others changes."""
    line = f"forward {dtype} {sizes} d{dims} mask={mask} scale=2"
    clean = Scores(line, kernels).mix().run()
    clean.judge(mask)
    last = len(clean.keys) - 1
    for key in (0, last // 2, last):
        c = Scores(line, kernels).mix()
        c.dense["k"][0, key, 0, 5] = math.nan
        c.run()
        seen = c.sees(mask, len(c.rows), len(c.keys))[0, 0, :, key]
        for name in ("out", "lse"):
            bits, right = ints_of(c.arrays[name]), ints_of(clean.arrays[name])
            assert torch.equal(bits[:, ~seen], right[:, ~seen]) and torch.equal(bits[:, :, 2:], right[:, :, 2:]), (name, key)
            assert c.arrays[name][:, seen, :2].isnan().all(), (name, key)


# --------------------------------------------------------------------------------------------- beside whatever there is


@by_each
@by_dtype
@by_dims
@pytest.mark.parametrize("scale", (2, 128))
@pytest.mark.parametrize("sink", ("", "sink"))
def test_A02_M05_rows_without_keys_beside_far_scores(sink, scale, dims, dtype, kernels):
    """The first 130 rows see nothing: zeros, and -inf or the sink. Sinks lie beside, above and below all scores."""
    c = Scores(f"forward {dtype} h4/2 q300 k170 d{dims} mask=causal scale={scale} {sink}", kernels).mix()
    sinks = torch.tensor((0, -1000, -1e7 * scale, -math.inf), device=DEVICE)
    if sink:
        c.arrays["sinks"].copy_(sinks.view(1, 1, 4, 1))
    c.run().judge("causal", **{n: x for n, x in c.arrays.items() if n == "sinks"})
    assert not c.arrays["out"][:, :130].any()
    assert (c.arrays["lse"][0, :130, :, 0] == (sinks if sink else -math.inf)).all()


@by_each
@by_dtype
@by_mask
@pytest.mark.parametrize("dims", ("64", "128", "192/128"))
def test_B10_far_scores_in_splits(dims, mask, dtype, kernels):
    """One head of 128 rows: keys go to several blocks, whose bases lie far from each other."""
    Scores(f"forward {dtype} h1 q128 k8192 d{dims} mask={mask} scale=2", kernels).mix().run().judge(mask)


@by_each
@by_dtype
@pytest.mark.parametrize("sizes", ("q64 k1000 page=16", "q100 k700 page=256", "q64 k2500 page=16"))
@pytest.mark.parametrize("dims", ("64", "128", "192/128"))
def test_B10_far_scores_in_pages(dims, sizes, dtype, kernels):
    """Of a cache whose last page is not full; of the longest the keys go to several blocks."""
    Scores(f"decode {dtype} h4/2 {sizes} d{dims} mask=causal scale=2", kernels).mix().run().judge("causal")


@by_each
@by_dtype
@by_dims
@by_mask
def test_B10_far_scores_in_a_packed_batch(mask, dims, dtype, kernels):
    """Of unlike lengths; the last sequence has, under a causal mask, rows without keys."""
    lengths = (300, 500), (1, 100), (130, 700), (90, 40)
    q, k = (",".join(map(str, n)) for n in zip(*lengths))
    c = Scores(f"forward {dtype} h4/2 d{dims} varlen=q[{q}]k[{k}] mask={mask} scale=2", kernels).mix().run()
    first_row, first_key = 0, 0
    for rows, keys in lengths:
        c.judge(mask, (EVERY, slice(first_row, first_row + rows), slice(first_key, first_key + keys)))
        first_row, first_key = first_row + rows, first_key + keys


@by_each
@by_dtype
@by_dims
@by_mask
def test_B10_far_scores_in_parts_of_tensors(mask, dims, dtype, kernels):
    """Some of the largest scores are of keys past the used ones."""
    c = Scores(f"forward {dtype} b2 h4/2 q200 k600 d{dims} seqused=q[200,111]k[331,600] mask={mask} scale=2", kernels)
    c.mix().run()
    for b, (rows, keys) in enumerate(((200, 331), (111, 600))):
        c.judge(mask, (slice(b, b + 1), slice(rows), slice(keys)))
    assert not c.arrays["out"][1, 111:].any() and c.arrays["lse"][1, 111:].isneginf().all()


@by_each
@by_dtype
@by_dims
@pytest.mark.parametrize("mask", list(MASKS)[2:])
def test_B10_far_scores_in_bands(mask, dims, dtype, kernels):
    """Keys come into a row's sight and leave it."""
    Scores(f"forward {dtype} h4/2 q300 k500 d{dims} mask={mask} scale=2", kernels).mix().run().judge(mask)


# ----------------------------------------------------------------------------------------------------- what pairs have

PAIRS = (
    "softcap=20",
    "softcap=1000 mask=causal",
    "alibi mask=causal",
    "bias=1,h,q,k",
    "bias=1,h,q,k mask=causal alibi sink",
    "mask=keep(1,h,q,k)",
    "mask=causal&exclude_keys",
    "mask=documents",
    "dropout=0.3@seed7 mask=causal",
    "dropout=0.3@seed7@offset5 softcap=1000 bias=1,h,q,k mask=causal&keep(1,1,q,k)&exclude_keys sink",
)


def with_pairs(line, kernels):
    """A mixed case and what `judge` is to know of its pairs: slopes to 2^20; biases of -inf in whole tiles, those that rows
    meet first or last, and of 2^30 (60000) in one place; masks that hide such tiles too; sinks near and far from scores."""
    c = Scores(line + " scale=2", kernels).mix()
    p, arrays, rows, keys = c.problem, c.arrays, len(c.rows), len(c.keys)
    given = {"softcap": p.softcap, "keep": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=DEVICE)}
    if "slopes" in arrays:
        arrays["slopes"].copy_(torch.tensor((1, 16, 1024, 2**20)).view(1, 1, 4, 1))
        given["bias"] = -arrays["slopes"].double().view(1, 4, 1, 1) * (c.rows[:, None] + keys - rows - c.keys).abs()
    if "bias" in arrays:
        bias = arrays["bias"].copy_(arrays["bias"].float().round().clamp(-3, 3))
        bias[:, :, 50, 7] = bias[:, :, 51, keys - 50] = 2**30 if bias.dtype == torch.bfloat16 else 60000
        bias[:, :2, :100, 64:384] = bias[:, 2, :, :300] = bias[:, 3, :, 200:] = bias[:, :, 130] = -math.inf
        given["bias"] = given.get("bias", 0) + bias.double()
        given["keep"] = given["keep"] & ~bias.isneginf()
    if "keep" in arrays:
        arrays["keep"][:, :, 100:, 200:] = False
        given["keep"] = given["keep"] & arrays["keep"]
    if "exclude_keys" in arrays:
        arrays["exclude_keys"][:, 7] = arrays["exclude_keys"][:, 400:] = True
        given["keep"] = given["keep"] & ~arrays["exclude_keys"].view(1, 1, 1, keys)
    if "documents_q" in arrays:
        given["keep"] = given["keep"] & (arrays["documents_q"] == arrays["documents_k"].view(1, 1, 1, keys))[:, None, :, 0]
    if "sinks" in arrays:
        arrays["sinks"].copy_(torch.tensor((0, -1000, -2e7, -math.inf)).view(1, 1, 4, 1))
        given["sinks"] = arrays["sinks"]
    if p.dropout:
        kept = tessera.dropout_mask(p.dropout, seed=p.seed, offset=p.offset, batch=1, heads=4, rows=rows, keys=keys)
        given["drop"] = torch.from_numpy(kept).to(DEVICE).double() / (1 - p.dropout)
    return c, given


@by_each
@by_dtype
@by_dims
@pytest.mark.parametrize("words", PAIRS)
def test_B09_B10_far_scores_with_what_pairs_have(words, dims, dtype, kernels):
    """Softcaps, slopes, biases, masks, dropped pairs and sinks, alone and all together."""
    c, given = with_pairs(f"forward {dtype} h4/2 q200 k450 d{dims} {words}", kernels)
    c.run().judge("causal" if "causal" in words else "none", **given)


@by_each
@by_dtype
@pytest.mark.parametrize(("dims", "bad"), (("64", math.nan), ("128", math.nan), ("256", math.nan), ("128", math.inf)))
@pytest.mark.parametrize("words", PAIRS[3:8])
def test_B04_a_bad_key_that_pairs_hide(words, bad, dims, dtype, kernels):
    """A NaN or infinity in K does not reach the rows that a bias of -inf, a mask or a document keeps from it."""
    c, given = with_pairs(f"forward {dtype} h4/2 q200 k450 d{dims} {words}", kernels)
    for key in (7, 250, 330):
        before = c.dense["k"][:, key].clone()
        c.dense["k"][:, key, :, 5] = bad
        c.run()
        c.dense["k"][:, key] = before
        mask = "causal" if "causal" in words else "none"
        sees = (given["keep"] & c.sees(mask, len(c.rows), len(c.keys)))[..., key].expand(1, 4, -1).transpose(1, 2)
        c.judge(mask, but=sees, **given)
        assert math.isinf(bad) or c.arrays["out"][sees].isnan().all()

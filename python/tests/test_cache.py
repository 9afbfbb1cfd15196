"""decode, append and cascade on NumPy arrays against plain attention over the same keys."""

import numpy as np
import pytest
from conftest import causal, close, reference

import tessera
from tessera import Level, Mask


def i32(*numbers):
    return np.array(numbers, np.int32)


def test_decode_appends_then_attends(normal):
    k, v = normal(3, 16, 2, 16), normal(3, 16, 2, 8)
    before = k.copy()
    q, k_new, v_new = normal(2, 2, 4, 16), normal(2, 2, 2, 16), normal(2, 2, 2, 8)
    lens, rows = i32(3, 5), i32(2, 0)
    r = tessera.decode(
        q, k, v, cache_lens=lens, k_new=k_new, v_new=v_new, cache_batch_idx=rows, mask="causal", return_lse=True
    )
    for b, (row, n) in enumerate(zip(rows, lens)):
        assert np.array_equal(k[row, n : n + 2], k_new[b]) and np.array_equal(v[row, n : n + 2], v_new[b])
        out, lse = reference(q[b : b + 1], k[row : row + 1, : n + 2], v[row : row + 1, : n + 2], causal(2, n + 2))
        close(r.out[b : b + 1], out)
        close(r.lse[b : b + 1], lse)
    before[2, 3:5], before[0, 5:7] = k_new
    assert np.array_equal(k, before)  # and nothing else was written


@pytest.mark.parametrize("page", [1, 4])
def test_pages(normal, rng, page):
    columns = 12 // page
    table = rng.permutation(2 * columns + 3)[: 2 * columns].astype(np.int32).reshape(2, columns)
    k, v = normal(2 * columns + 3, page, 2, 16), normal(2 * columns + 3, page, 2, 8)
    q, k_new, v_new = normal(2, 1, 4, 16), normal(2, 1, 2, 16), normal(2, 1, 2, 8)
    lens = i32(6, 11)
    tessera.append(k, v, k_new, v_new, cache_lens=lens, page_table=table)
    r = tessera.decode(q, k, v, cache_lens=lens + 1, page_table=table)
    for b, n in enumerate(lens + 1):
        keys, values = (x[table[b]].reshape(1, 12, 2, -1)[:, :n] for x in (k, v))
        assert np.array_equal(keys[0, n - 1], k_new[b, 0])
        close(r.out[b : b + 1], reference(q[b : b + 1], keys, values)[0])


def test_a_decode_step_is_the_last_row_of_the_full_run(normal):
    k, v, q = normal(1, 40, 2, 32), normal(1, 40, 2, 32), normal(1, 40, 4, 32)
    full = tessera.attention(q, k, v, mask="causal", batch_invariant=True).out
    step = tessera.decode(q[:, -1:], k, v, cache_lens=i32(40), mask="causal", batch_invariant=True).out
    assert np.array_equal(full[:, -1:], step)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(normal, interleaved):
    half = 4
    angles = np.arange(20)[:, None] * 0.3 ** np.arange(half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def rotate(x, positions):
        x = x.astype(np.float64)
        one, two = (slice(0, 8, 2), slice(1, 8, 2)) if interleaved else (slice(0, 4), slice(4, 8))
        c, s = cos[positions][None, :, None], sin[positions][None, :, None]
        a, b = x[..., one].copy(), x[..., two].copy()
        x[..., one], x[..., two] = a * c - b * s, a * s + b * c
        return x

    k, v = np.zeros((1, 16, 1, 16), np.float32), np.zeros((1, 16, 1, 16), np.float32)
    old, q, k_new, v_new = normal(1, 5, 1, 16), normal(1, 2, 2, 16), normal(1, 2, 1, 16), normal(1, 2, 1, 16)
    k[:, :5], v[:, :5] = old, old
    r = tessera.decode(
        q, k, v, cache_lens=i32(5), k_new=k_new, v_new=v_new, cos=cos, sin=sin, rotary_interleaved=interleaved, mask="causal"
    )
    close(k[:, 5:7], rotate(k_new, [5, 6]))
    close(r.out, reference(rotate(q, [5, 6]), k[:, :7], v[:, :7], causal(2, 7))[0])


def test_left_padding_and_shared_memory_of_k_and_v(normal):
    store, q = normal(2, 8, 1, 16), normal(2, 1, 4, 16)
    pad, lens = i32(0, 3), i32(6, 8)
    r = tessera.decode(q, store, store[..., :8], v_in_k=True, cache_lens=lens, left_pad=pad)
    for b in range(2):
        keys = store[b : b + 1, pad[b] : lens[b]]
        close(r.out[b : b + 1], reference(q[b : b + 1], keys, keys[..., :8])[0])


def test_ring(normal):
    k, v = np.zeros((1, 4, 1, 8), np.float32), np.zeros((1, 4, 1, 8), np.float32)
    keys, values, q = normal(1, 9, 1, 8), normal(1, 9, 1, 8), normal(1, 9, 2, 8)
    for n in range(9):
        step = slice(n, n + 1)
        r = tessera.decode(
            q[:, step], k, v, cache_lens=i32(n), k_new=keys[:, step], v_new=values[:, step], ring=True,
            mask=Mask.last(4), max_len_k=9,
        )  # fmt: skip
        seen = slice(max(0, n - 3), n + 1)
        close(r.out, reference(q[:, step], keys[:, seen], values[:, seen])[0])


def test_e4m3(normal):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    k, v = (normal(2, 8, 2, 16).astype(ml_dtypes.float8_e4m3fn) for _ in range(2))
    q = normal(2, 1, 4, 16).astype(ml_dtypes.bfloat16)
    scale = np.array([0.5, 2.0], np.float32)
    r = tessera.decode(q, k, v, cache_lens=i32(8, 5), k_scale=scale, v_scale=scale)
    for b, n in enumerate((8, 5)):
        keys, values = (x[b : b + 1, :n].astype(np.float32) * scale[:, None] for x in (k, v))
        close(r.out[b : b + 1], reference(q[b : b + 1].astype(np.float32), keys, values)[0], 1e-2)


def test_cascade(normal):
    q, prefix = normal(6, 4, 16), Level(normal(1, 9, 2, 16), normal(1, 9, 2, 8))
    k, v = normal(3, 5, 2, 16), normal(3, 5, 2, 8)
    own = Level(k, v, cu_seqlens_q=i32(0, 2, 4, 6), cache_lens=i32(5, 2, 4), mask="causal")
    r = tessera.cascade(q, [prefix, own], return_lse=True)
    for b, n in enumerate((5, 2, 4)):
        keys, values = (
            np.concatenate([prefix.arrays[name], x[b : b + 1, :n]], 1) for name, x in (("k", k), ("v", v))
        )
        rows = slice(2 * b, 2 * b + 2)
        out, lse = reference(q[None, rows], keys, values, causal(2, n + 9))
        close(r.out[rows], out[0])
        close(r.lse[:, rows], lse[0])


def test_errors_write_nothing(normal):
    k, v, q = normal(2, 4, 1, 8), normal(2, 4, 1, 8), normal(2, 1, 1, 8)
    before = k.copy()
    new = {"k_new": q, "v_new": q}
    status = i32(0)
    for text, arguments in (
        ("has 4 slots", dict(cache_lens=i32(4, 0), status=status, **new)),
        ("cache_lens is None", new),
        ("k_cache has shape", dict(cache_lens=i32(0, 0), page_table=i32(0, 1), **new)),
        ("names page 7", dict(cache_lens=i32(1, 1), page_table=np.array([[0], [7]], np.int32))),
        ("cache_batch_idx", dict(cache_lens=i32(1, 1), cache_batch_idx=i32(0, 2))),
    ):
        arguments = {"mask": "causal", **arguments}
        with pytest.raises(ValueError, match=text if text != "k_cache has shape" else "page_table has shape"):
            tessera.decode(q, k, v, **arguments)
    assert np.array_equal(k, before) and status[0] != 0
    k.flags.writeable = False
    with pytest.raises(ValueError, match="k_cache is read-only"):
        tessera.append(k, v, q, q, cache_lens=i32(0, 0))

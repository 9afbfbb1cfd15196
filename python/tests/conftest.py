"""What the tests share: random arrays, and attention written out in float64 as the contract says."""

import numpy as np
import pytest


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture
def normal(rng):
    return lambda *shape: rng.standard_normal(shape).astype(np.float32)


def causal(rows, keys, offset=None):
    offset = keys - rows if offset is None else offset
    return np.arange(keys)[None, :] <= np.arange(rows)[:, None] + offset


def reference(q, k, v, keep=None, *, scale=None, softcap=None, bias=None, slopes=None, sinks=None, offset=None):
    """(out, lse) of (B, S, H, D) arrays in float64. keep broadcasts to (B, H, Sq, Sk)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    rows, keys = q.shape[1], k.shape[1]
    s = np.einsum("bshd,bkhd->bhsk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)
    if slopes is not None:
        away = np.abs(np.arange(rows)[:, None] + (keys - rows if offset is None else offset) - np.arange(keys))
        s = s - np.broadcast_to(slopes, (q.shape[0], q.shape[2]))[:, :, None, None] * away
    if bias is not None:
        s = s + bias
    if keep is not None:
        s = np.where(keep, s, -np.inf)
    terms = s if sinks is None else np.concatenate([s, np.broadcast_to(sinks[None, :, None, None], (*s.shape[:3], 1))], 3)
    top = np.max(terms, -1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(terms - top).sum(-1)) + top[..., 0]
    weights = np.where(np.isfinite(lse)[..., None], np.exp(s - np.where(np.isfinite(lse), lse, 0)[..., None]), 0)
    return np.einsum("bhsk,bkhd->bshd", weights, v), lse


def close(got, want, bound=2e-6):
    got = np.asarray(got, dtype=np.float64)
    assert got.shape == want.shape
    assert np.array_equal(np.isinf(got), np.isinf(want))
    finite = np.isfinite(want)
    assert np.abs(got[finite] - want[finite]).max(initial=0) <= bound * max(1, np.abs(want[finite]).max(initial=0))

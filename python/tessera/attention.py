"""Attention on arrays: NumPy, torch, anything with DLPack."""

from __future__ import annotations

from typing import Any

from . import tracing
from .calls import FORWARD_NAMES, Options, Result, ResultWithMax, bridge, explain, forward_caller, is_torch, mask_of
from .mask import NO_ARRAYS, Mask

Array = Any  # a NumPy array, a torch tensor, or anything with __dlpack__


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Mask | str | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Array | None = None,
    slopes: Array | None = None,
    sinks: Array | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    layout: str = "bshd",
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_len_q: int | None = None,
    max_len_k: int | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    status: Array | None = None,
    out: Array | None = None,
    out_dtype: str | None = None,
    return_lse: bool = False,
    return_max_score: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    allow_tf32: bool = False,
    kernels: str | None = None,
    threads: int = 0,
    workspace_limit: int | None = None,
) -> Result | ResultWithMax:
    """softmax(scale * q k^T, masked) v, exactly, in tiles; never an array of Sq x Sk. The meaning of every option is in
    docs/contract.md. torch tensors that require gradients get them: q, k, v, bias, slopes, sinks, and lse carries its own.

    Arrays (B batch, Sq and Sk lengths, Hq and Hkv heads, D and Dv dims), any strides, none is copied:

    * q: (B, Sq, Hq, D), k: (B, Sk, Hkv, D), v: (B, Sk, Hkv, Dv); with layout="bhsd" (B, Hq, Sq, D) and so on.
      float64, float32, bfloat16 or float16. Hkv divides Hq; query head h reads KV head h // (Hq // Hkv).
    * cu_seqlens_q, cu_seqlens_k: int32 (B + 1,), makes q, or k and v, packed: no batch axis, sequence b in rows cu[b] to
      cu[b + 1]. max_len_q, max_len_k: bounds of a packed sequence's length; less memory and better plans if given.
    * seqused_q, seqused_k: int32 (B,), the rows used of each sequence. Rows beyond return 0 and lse -inf.
    * status: int32 (1,), to which a run adds what was unsound in these lengths. On a CPU that is a ValueError besides; a GPU,
      which alone knows them, leaves such a sequence out: its rows of the result hold nothing.
    * bias: float, 4 dimensions that broadcast to (B, Hq, Sq, Sk), added to the scores; -inf excludes.
    * slopes: (Hq,) or (B, Hq), ALiBi: score -= slope * |p - j|. sinks: (Hq,). float32, of float64 float64.

    Numbers: scale defaults to 1/sqrt(D); softcap c makes scores c tanh(score / c), before bias and mask. dropout is a
    probability; its mask is a function of (seed, offset, place) alone, see :func:`dropout_mask`.

    mask: a :class:`Mask`, or its text ("causal", "causal&window(128,0)"). Causal means bottom-right: the last query sees
    the last key; say Mask.causal("top_left") for the other corner.

    out: receives the result (no gradients then); its memory must not overlap what is read. out_dtype "f32": partial results for merging. return_lse,
    return_max_score: fill these fields of the result.

    deterministic: repeatable gradients (forward always is). batch_invariant: a row's bits depend on nothing else in the
    batch. kernels, threads, workspace_limit (bytes): hints, which change speed only.

    Raises ValueError (argument, value, rule, way out), NotImplementedError (a fair question that no kernel answers: every
    kernel's reason), TypeError (not an array).

    Source: FlashAttention-2, Dao 2023, arXiv:2307.08691.
    """
    if mask is None:
        text, masks = "none", NO_ARRAYS
    else:
        m = mask if type(mask) is Mask else mask_of(mask)
        text, masks = m._text, m.in_order
    key = (
        text,
        scale,
        softcap,
        dropout,
        layout,
        max_len_q,
        max_len_k,
        out_dtype,
        return_lse,
        return_max_score,
        deterministic,
        batch_invariant,
        allow_tf32,
        kernels,
        threads,
        workspace_limit,
    )
    arrays = (q, k, v, bias, slopes, sinks, *masks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, status, out)
    try:
        return (runners.get(type(q)) or runner_of(q))(key, seed, offset, arrays)
    except (TypeError, AttributeError) as error:
        explain(error, Options(*key), {n: a for n, a in zip(FORWARD_NAMES, arrays) if a is not None})
        raise


def on_host(key: tuple, seed: int, offset: int, arrays: tuple) -> Result:
    """NumPy's arrays and all others that are no torch tensors."""
    made = forward_caller(key)(arrays, seed, offset, None)
    if tracing._open:
        tracing.record("attention", made.plan)
    return made


runners: dict[type, Any] = {}  # by the type of q


def runner_of(q: Array) -> Any:
    runner = runners[type(q)] = bridge().runner_of(type(q)) if is_torch(q) else on_host
    return runner

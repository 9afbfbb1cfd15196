"""tessera.attention on NumPy arrays against the formulas."""

import threading

import numpy as np
import pytest
from conftest import causal, close, reference

import tessera
from tessera import Mask


@pytest.fixture
def qkv(normal):
    return normal(2, 5, 4, 16), normal(2, 7, 2, 16), normal(2, 7, 2, 8)


def test_plain(qkv):
    r = tessera.attention(*qkv, return_lse=True)
    out, lse = reference(*qkv)
    close(r.out, out)
    close(r.lse, lse)
    assert r.out.dtype == np.float32 and r.lse.dtype == np.float32
    out_again, lse_again, plan = tessera.attention(*qkv, return_lse=True)
    assert np.array_equal(out_again, r.out) and np.array_equal(lse_again, r.lse)
    assert plan.kernel.startswith("cpu.") and "forward f32 b2 h4/2 q5 k7 d16/8" in plan.line


def test_without_lse_there_is_none(qkv):
    assert tessera.attention(*qkv).lse is None


MASKS = {
    "causal": (Mask.causal(), causal(5, 7)),
    "text": ("causal", causal(5, 7)),
    "top_left": (Mask.causal("top_left"), causal(5, 7, 0)),
    "at": (Mask.causal(-1), causal(5, 7, -1)),
    "at each": (Mask.causal(np.array([0, 2], np.int32)), np.stack([causal(5, 7, 0), causal(5, 7, 2)])[:, None]),
    "window": (Mask.window(1, 1), np.abs(np.arange(5)[:, None] + 2 - np.arange(7)) <= 1),
    "one side": (Mask.window(None, 0), causal(5, 7)),
    "last": (Mask.last(2), causal(5, 7) & ~causal(5, 7, 0)),
    "chunk": (Mask.chunk(3), (np.arange(5)[:, None] + 2) // 3 == np.arange(7) // 3),
    "prefix": (Mask.prefix(4), causal(5, 7) | (np.arange(7) < 4)),
    "first": (Mask.window(0, 0) & Mask.first(1), (np.arange(5)[:, None] + 2 == np.arange(7)) | (np.arange(7) < 1)),
    "nothing": (Mask.window(-3, 0), np.zeros((5, 7), bool)),
    "both": (Mask.causal() & Mask.chunk(3), causal(5, 7) & ((np.arange(5)[:, None] + 2) // 3 == np.arange(7) // 3)),
}


@pytest.mark.parametrize("name", MASKS)
def test_band_masks(qkv, name):
    mask, keep = MASKS[name]
    r = tessera.attention(*qkv, mask=mask, return_lse=True)
    out, lse = reference(*qkv, keep)
    close(r.out, out)
    close(r.lse, lse)


def test_array_masks(qkv, rng):
    keep = rng.random((2, 1, 5, 7)) < 0.5
    excluded = rng.random((2, 7)) < 0.3
    ids_q, ids_k = (np.sort(rng.integers(0, 2, (2, n))).astype(np.int32) for n in (5, 7))
    close(tessera.attention(*qkv, mask=Mask.keep(keep)).out, reference(*qkv, keep)[0])
    close(tessera.attention(*qkv, mask=Mask.exclude_keys(excluded)).out, reference(*qkv, ~excluded[:, None, None])[0])
    same = (ids_q[:, :, None] == ids_k[:, None, :])[:, None]
    close(tessera.attention(*qkv, mask=Mask.documents(ids_q, ids_k)).out, reference(*qkv, same)[0])
    all_of_them = Mask.causal() & Mask.keep(keep) & Mask.exclude_keys(excluded) & Mask.documents(ids_q, ids_k)
    want = keep & ~excluded[:, None, None] & same & causal(5, 7)
    close(tessera.attention(*qkv, mask=all_of_them).out, reference(*qkv, want)[0])


def test_excluded_keys_may_hold_anything(qkv):
    q, k, v = qkv
    excluded = np.zeros((2, 7), bool)
    excluded[:, 3] = True
    clean = tessera.attention(q, k, v, mask=Mask.exclude_keys(excluded)).out
    k[:, 3], v[:, 3] = np.nan, np.inf
    assert np.array_equal(tessera.attention(q, k, v, mask=Mask.exclude_keys(excluded)).out, clean)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.3},
        {"softcap": 2.0},
        {"bias": (2, 4, 5, 7)},
        {"bias": (1, 1, 1, 7)},
        {"slopes": (4,)},
        {"slopes": (2, 4)},
        {"sinks": (4,)},
        {"scale": 0.3, "softcap": 2.0, "bias": (1, 4, 5, 7), "slopes": (4,), "sinks": (4,)},
    ],
    ids=lambda options: "+".join(options),
)
def test_scores(qkv, normal, options):
    options = {name: abs(normal(*x)) if isinstance(x, tuple) else x for name, x in options.items()}
    r = tessera.attention(*qkv, return_lse=True, **options)
    out, lse = reference(*qkv, **options)
    close(r.out, out)
    close(r.lse, lse)


def test_max_score(qkv):
    r = tessera.attention(*qkv, mask="causal", return_max_score=True)
    q, k, _ = qkv
    s = np.einsum("bshd,bkhd->bhsk", q, np.repeat(k, 2, 2)) / 4
    close(r.max_score, np.where(causal(5, 7), s, -np.inf).max(-1))


def test_dropout_is_the_exported_mask(qkv):
    q, k, v = qkv
    eye = np.tile(np.eye(7, dtype=np.float32)[None, :, None], (2, 1, 2, 1))
    weights = tessera.attention(q, k, eye).out
    dropped = tessera.attention(q, k, eye, dropout=0.4, seed=5, offset=1 << 40).out
    keep = tessera.dropout_mask(0.4, seed=5, offset=1 << 40, batch=2, heads=4, rows=5, keys=7)
    close(dropped, np.where(keep.transpose(0, 2, 1, 3), weights.astype(np.float64) / 0.6, 0))


def test_layouts_and_strides_give_the_same_bits(qkv):
    want = tessera.attention(*qkv, mask="causal").out
    heads_first = [x.transpose(0, 2, 1, 3).copy() for x in qkv]
    got = tessera.attention(*heads_first, mask="causal", layout="bhsd").out
    assert np.array_equal(got.transpose(0, 2, 1, 3), want)
    views = [x.transpose(0, 2, 1, 3) for x in heads_first]
    assert np.array_equal(tessera.attention(*views, mask="causal").out, want)
    spread = [np.repeat(x, 3, 3)[..., ::3] for x in qkv]  # the last dimension is not contiguous
    assert np.array_equal(tessera.attention(*spread, mask="causal").out, want)
    odd = []
    for x in qkv:  # 4 bytes off every larger alignment
        memory = np.empty(x.size + 1, np.float32)
        odd.append(memory[1:].reshape(x.shape))
        odd[-1][...] = x
    assert np.array_equal(tessera.attention(*odd, mask="causal").out, want)


def test_inputs_are_not_written_and_out_is(qkv):
    before = [x.copy() for x in qkv]
    for x in qkv:
        x.flags.writeable = False
    out = np.empty((2, 5, 4, 8), np.float32)
    r = tessera.attention(*qkv, out=out)
    assert r.out is out
    assert all(np.array_equal(x, y) for x, y in zip(qkv, before))
    close(out, reference(*qkv)[0])


@pytest.mark.parametrize("dtype,bound", [("float64", 1e-13), ("float16", 2e-3)])
def test_dtypes(qkv, dtype, bound):
    qkv = [x.astype(dtype) for x in qkv]
    r = tessera.attention(*qkv, return_lse=True)
    assert r.out.dtype == dtype and r.lse.dtype == ("float64" if dtype == "float64" else "float32")
    close(r.out, reference(*qkv)[0], bound)


def test_bfloat16(qkv):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    qkv = [x.astype(ml_dtypes.bfloat16) for x in qkv]
    r = tessera.attention(*qkv)
    assert r.out.dtype == ml_dtypes.bfloat16
    close(r.out, reference(*qkv)[0], 1e-2)
    assert tessera.attention(*qkv, out_dtype="f32").out.dtype == np.float32


def test_packed(normal):
    cu_q, cu_k = np.array([0, 3, 3, 6], np.int32), np.array([0, 2, 4, 9], np.int32)
    q, k, v = normal(8, 4, 16), normal(9, 2, 16), normal(9, 2, 8)  # two rows beyond the last sequence
    r = tessera.attention(q, k, v, mask="causal", cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_len_q=3, return_lse=True)
    assert r.out.shape == (8, 4, 8) and r.lse.shape == (4, 8)
    for b in range(3):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        if rows.start == rows.stop:
            continue
        keep = causal(rows.stop - rows.start, keys.stop - keys.start)
        out, lse = reference(q[None, rows], k[None, keys], v[None, keys], keep)
        close(r.out[rows], out[0])
        close(r.lse[:, rows], lse[0])
    assert np.all(r.out[6:] == 0) and np.all(r.lse[:, 6:] == -np.inf)


def test_used_lengths(qkv):
    r = tessera.attention(*qkv, seqused_q=np.array([5, 2], np.int32), seqused_k=np.array([7, 3], np.int32))
    q, k, v = qkv
    close(r.out[:1], reference(q[:1], k[:1], v[:1])[0])
    close(r.out[1:, :2], reference(q[1:, :2], k[1:, :3], v[1:, :3])[0])
    assert np.all(r.out[1, 2:] == 0)


@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_nothing_is_legal(normal, shape):
    b, rows, keys = shape
    r = tessera.attention(normal(b, rows, 4, 16), normal(b, keys, 2, 16), normal(b, keys, 2, 8), return_lse=True)
    assert r.out.shape == (b, rows, 4, 8) and np.all(r.out == 0) and np.all(r.lse == -np.inf)


def test_merge_and_out_dtype(qkv):
    q, k, v = qkv
    parts = [tessera.attention(q, k[:, keys], v[:, keys], return_lse=True) for keys in (slice(3), slice(3, 7))]
    empty = tessera.attention(q, k[:, :0], v[:, :0], return_lse=True)
    out, lse = tessera.merge([p.out for p in (*parts, empty)], [p.lse for p in (*parts, empty)])
    want = reference(q, k, v)
    close(out, want[0])
    close(lse, want[1])


def test_plan_runs_again_and_refuses_others(qkv, normal):
    q, k, v = qkv
    plan = tessera.plan(q, k, v, mask="causal", return_lse=True)
    assert plan.engine == "cpu" and plan.workspace_bytes > 0 and "causal" in str(plan)
    out, lse = np.empty((2, 5, 4, 8), np.float32), np.empty((2, 4, 5), np.float32)
    for _ in range(2):
        x = [normal(*a.shape) for a in qkv]
        plan.run(q=x[0], k=x[1], v=x[2], out=out, lse=lse)
        close(out, reference(*x, causal(5, 7))[0])
    with pytest.raises(ValueError, match="plan was made for"):
        plan.run(q=q[:, :4], k=k, v=v, out=out, lse=lse)
    with pytest.raises(ValueError, match="lse is missing"):
        plan.run(q=q, k=k, v=v, out=out)
    with pytest.raises(ValueError, match="no array of this plan"):
        plan.run(q=q, k=k, v=v, out=out, lse=lse, bias=q)


def test_plan_of_a_line():
    plan = tessera.plan("forward bf16 b4 h32/8 q4096 k4096 d128 mask=causal")
    assert plan.score_bytes_avoided == 4 * 32 * 4096 * 4096 * 4
    assert any(name == "reference.oracle" for name, _ in plan.reasons())
    with pytest.raises(ValueError, match="cusal"):
        tessera.plan("forward f32 d64 mask=cusal")
    with pytest.raises(ValueError, match="without arrays"):
        plan.run()


def test_trace(qkv):
    with tessera.trace() as trace:
        r = tessera.attention(*qkv)
        with tessera.trace() as inner:
            tessera.attention(*qkv, mask="causal")
    tessera.attention(*qkv)
    assert len(trace.calls) == 2 and len(inner.calls) == 1
    call = trace.calls[0]
    assert call["kernel"] == r.plan.kernel and call["library"].endswith(".so") and call["fallback"] is None
    assert {"kernel", "reason"} == set(call["refused"][0])
    assert r.plan.kernel in str(trace) and '"engine": "cpu"' in trace.json()


def test_manifest():
    import json

    facts = tessera.manifest()
    assert facts["tessera"] == tessera.__version__ and facts["numpy"] == np.__version__
    json.dumps(facts)


def test_many_threads_at_once(qkv):
    want = tessera.attention(*qkv, mask="causal").out
    wrong = []

    def work():
        for n in range(200):
            keys = 7 - n % 3
            got = tessera.attention(qkv[0], qkv[1][:, :keys], qkv[2][:, :keys], mask="causal").out
            if keys == 7 and not np.array_equal(got, want):
                wrong.append(n)

    workers = [threading.Thread(target=work) for _ in range(4)]
    [w.start() for w in workers]
    [w.join() for w in workers]
    assert not wrong


def test_new_shapes_forever_hold_no_memory(normal):
    """Plans of shapes that never come back are forgotten."""
    import resource

    k = normal(1, 4000, 1, 4)
    q = normal(1, 1, 1, 4)
    for n in range(1, 1500):
        tessera.attention(q, k[:, :n], k[:, :n])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for n in range(1500, 4000):
        tessera.attention(q, k[:, :n], k[:, :n])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4000  # kB; 2,500 plans would be 30 MB


def test_other_arrays_by_dlpack(qkv):
    class Foreign:
        """What only speaks DLPack."""

        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__()

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    got = tessera.attention(*map(Foreign, qkv)).out
    assert isinstance(got, np.ndarray)
    close(got, reference(*qkv)[0])


# ------------------------------------------------------------------------------------------------------------ errors


def rejects(kind, text, call):
    with pytest.raises(kind, match=text):
        call()


def test_errors_name_argument_value_rule_and_way_out(qkv, normal):
    q, k, v = qkv
    a = tessera.attention
    rejects(TypeError, "q is of type list; it must be", lambda: a(q.tolist(), k, v))
    rejects(TypeError, "k is of type int; it must be", lambda: a(q, 3, v))
    rejects(ValueError, "v is None; it must be given", lambda: a(q, k, None))
    rejects(ValueError, r"k has shape \(2, 7, 2, 8\); .* with dim = 16, as q says", lambda: a(q, k[..., :8], v))
    rejects(ValueError, "q has shape .*must be .batch, seq_q, heads_q, dim", lambda: a(q[0], k, v))
    rejects(ValueError, "heads", lambda: a(q[:, :, :3], k, v))
    rejects(ValueError, "k has dtype int64.*Convert", lambda: a(q, k.astype(np.int64), v))
    rejects(ValueError, "k.dtype is f64; it must be q's, f32", lambda: a(q, k.astype(np.float64), v))
    rejects(ValueError, "has dtype >f4|dtype", lambda: a(q.astype(">f4"), k, v))
    rejects(ValueError, "layout is 'sbhd'", lambda: a(q, k, v, layout="sbhd"))
    rejects(ValueError, "dropout is 1;", lambda: a(q, k, v, dropout=1.0))
    rejects(ValueError, "softcap", lambda: a(q, k, v, softcap=-1.0))
    rejects(ValueError, "scale is a str", lambda: a(q, k, v, scale="1"))
    rejects(ValueError, "scale", lambda: a(q, k, v, scale=float("nan")))
    rejects(ValueError, "seed is -1", lambda: a(q, k, v, seed=-1))
    rejects(ValueError, "Mask.keep", lambda: a(q, k, v, mask=np.ones((5, 7), bool)))
    rejects(ValueError, "keep has shape", lambda: a(q, k, v, mask=Mask.keep(np.ones((5, 7), bool))))
    rejects(ValueError, "keep.dtype", lambda: a(q, k, v, mask=Mask.keep(normal(1, 1, 5, 7))))
    rejects(ValueError, "exclude_keys has shape", lambda: a(q, k, v, mask=Mask.exclude_keys(np.ones((2, 8), bool))))
    rejects(ValueError, "bias has shape", lambda: a(q, k, v, bias=normal(2, 4, 5, 8)))
    rejects(ValueError, "slopes has shape", lambda: a(q, k, v, slopes=normal(3)))
    rejects(ValueError, "cu_seqlens_q has dtype int64", lambda: a(q[0], k, v, cu_seqlens_q=np.array([0, 5])))
    rejects(ValueError, "max_len_k is 9", lambda: a(q, k, v, max_len_k=9))
    rejects(ValueError, "out is read-only|out", lambda: a(q, k, v, out=read_only(np.empty((2, 5, 4, 8), np.float32))))
    rejects(ValueError, "out has shape", lambda: a(q, k, v, out=np.empty((2, 5, 4, 9), np.float32)))
    rejects(ValueError, "out.dtype", lambda: a(q, k, v, out=np.empty((2, 5, 4, 8), np.float16)))
    rejects(ValueError, "one address", lambda: a(q, k, v[..., :8], out=q[..., :8]))
    rejects(ValueError, "kernels is", lambda: a(q, k, v, kernels="gpu"))
    rejects(NotImplementedError, "workspace", lambda: a(q, k, v, workspace_limit=0))
    rejects(TypeError, "causal", lambda: a(q, k, v, causal=True))


def read_only(array):
    array.flags.writeable = False
    return array


def test_malformed_lengths(normal):
    q, k, v = normal(6, 4, 16), normal(6, 2, 16), normal(6, 2, 8)
    for cu in ([1, 3, 6], [0, 4, 3], [0, 3, 7]):
        cu = np.array(cu, np.int32)
        rejects(ValueError, "cu_seqlens", lambda: tessera.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu))
    cu = np.array([0, 6], np.int32)
    rejects(
        ValueError, "max_len_q|promised", lambda: tessera.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_len_q=5)
    )


def test_masks_are_values():
    assert Mask("causal&window(4,0)") == Mask.window(4, 0) & Mask.causal()
    assert hash(Mask("causal")) == hash(Mask.causal())
    assert Mask.last(4).text == "window(3,0)"
    assert Mask.causal("top_left").text == "causal&corner@top_left"
    rejects(ValueError, "say it once", lambda: Mask.window(1, 0) & Mask.window(2, 0))
    rejects(ValueError, "corner is 'middle'", lambda: Mask.causal("middle"))
    rejects(ValueError, "whole number", lambda: Mask.window(1.5, 0))
    rejects(ValueError, "Mask.keep", lambda: Mask("keep"))
    rejects(ValueError, "last is 0", lambda: Mask.last(0))


def test_a_forked_process_goes_on(normal):
    """OpenMP's threads do not survive a fork; its run time would wait for them forever."""
    import os
    import signal
    import warnings

    x = normal(1, 512, 8, 64)
    want = tessera.attention(x, x, x, threads=2).out
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if np.array_equal(tessera.attention(x, x, x, threads=2).out, want) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_wrong_option_harms_only_its_own_call(qkv):
    for wrong in ({"dropout": False}, {"scale": True}, {"threads": 0.0}, {"return_lse": 0}, {"kernels": 0}, {"scale": [1]}):
        with pytest.raises(ValueError):
            tessera.attention(*qkv, softcap=5.25, **wrong)
    tessera.attention(*qkv, softcap=5.25)
    for wrong in ({"threads": -1}, {"threads": 2**31}, {"workspace_limit": -5}, {"max_len_q": 2.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            tessera.attention(*qkv, **wrong)


def test_what_would_be_lost_is_refused(qkv):
    q, k, v = qkv
    rejects(ValueError, "q is a masked array", lambda: tessera.attention(np.ma.array(q), k, v))
    rejects(ValueError, "keep is None", lambda: Mask.keep(None))
    rejects(ValueError, "the mask is", lambda: Mask("causal\tdropout=0.5"))
    rejects(ValueError, "device is 'cuda:0'", lambda: tessera.plan(q, k, v, device="cuda:0"))
    rejects(ValueError, "scale is given beside a line", lambda: tessera.plan("forward f32 d8", scale=2.0))
    rejects(ValueError, "out is f32 and out_dtype is 'f16'", lambda: tessera.attention(q, k, v, out=q[..., :8], out_dtype="f16"))
    rejects(ValueError, "seed is -1", lambda: tessera.dropout_mask(0.5, seed=-1, rows=1, keys=1))
    five = np.zeros((1, 2, 3, 4, 2), np.float32)
    rejects(ValueError, "has 5 dimensions", lambda: tessera.merge([five], [np.zeros((1, 3, 2), np.float32)]))


def test_malformed_exporters(qkv):
    class Bad:
        def __init__(self, **interface):
            self.interface = {"shape": (2, 5, 4, 16), "typestr": "<f4", "data": (64, False), **interface}

        @property
        def __array_interface__(self):
            return self.interface

    for bad in (Bad(data=()), Bad(strides=tuple(range(2000))), Bad(strides=[1, 2, 3, 4]), Bad(data=(None, False))):
        rejects(TypeError, "q has", lambda: tessera.attention(bad, *qkv[1:]))


def test_plans_are_freed(qkv):
    import gc
    import weakref

    plan = tessera.plan(*qkv)
    seen = weakref.ref(plan)
    del plan
    gc.collect()
    assert seen() is None


def test_the_program_ends_while_a_thread_attends():
    import subprocess
    import sys

    code = """if True:
        import threading, time, numpy, tessera
        x = numpy.ones((1, 600, 8, 64), numpy.float32)
        def work():
            while True: tessera.attention(x, x, x)
        threading.Thread(target=work, daemon=True).start()
        time.sleep(0.3)"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

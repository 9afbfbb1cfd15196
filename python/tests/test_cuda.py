"""CUDA tensors: the same answers, on the tensors' device and the current stream, in graphs; refusals in words."""

import subprocess
import sys
import textwrap
import threading

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import tessera  # noqa: E402

DTYPES = (torch.bfloat16, torch.float16)


def tensors(batch=2, seq_q=130, seq_k=200, heads=4, kv=2, dim=64, dtype=torch.bfloat16, device="cuda"):
    torch.manual_seed(1)
    make = lambda s, h: torch.randn(batch, s, h, dim, device=device, dtype=dtype)  # noqa: E731
    return make(seq_q, heads), make(seq_k, kv), make(seq_k, kv)


def reference(q, k, v, causal=True):
    """float64, (out, lse); causal to the bottom right."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if causal:
        rows, keys = s.shape[2:]
        i, j = torch.arange(rows, device=s.device)[:, None], torch.arange(keys, device=s.device)
        s = s.masked_fill(j > i + keys - rows, float("-inf"))
    return (torch.softmax(s, -1) @ v).transpose(1, 2), torch.logsumexp(s, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", (64, 128))
def test_agrees_with_float64(dtype, dim):
    q, k, v = tensors(dim=dim, dtype=dtype)
    out, lse, plan = tessera.attention(q, k, v, mask="causal", return_lse=True)
    expected, expected_lse = reference(q, k, v)
    assert plan.engine == "cuda" and plan.device == torch.cuda.get_device_name()
    assert out.dtype == dtype and out.device == q.device and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=0)


def test_layouts_views_and_out():
    q, k, v = tensors()
    expected = tessera.attention(q, k, v).out
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    assert torch.equal(tessera.attention(*heads_first, layout="bhsd").out.transpose(1, 2), expected)
    wide = torch.zeros(*q.shape[:3], 96, device="cuda", dtype=q.dtype)
    wide[..., :64] = q
    out = torch.empty_like(q)
    assert torch.equal(tessera.attention(wide[..., :64], k, v, out=out).out, expected)
    assert torch.equal(out, expected)
    assert tessera.attention(q, k, v, out_dtype="f32").out.dtype == torch.float32


def test_packed_sequences_are_those_alone():
    lengths = [100, 0, 1, 77]
    ends = [0, 100, 100, 101, 178]
    cu = torch.tensor(ends, device="cuda", dtype=torch.int32)
    q, k, v = (torch.randn(178, h, 128, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
    packed = tessera.attention(
        q, k, v, mask="causal", cu_seqlens_q=cu, cu_seqlens_k=cu, max_len_q=100, max_len_k=100
    ).out
    for n, length in enumerate(lengths):
        if length:
            one = slice(ends[n], ends[n + 1])
            alone = tessera.attention(q[None, one], k[None, one], v[None, one], mask="causal").out
            assert torch.equal(packed[one], alone[0])


def test_bits_repeat_and_depend_on_the_row_alone():
    q, k, v = tensors(batch=3, seq_q=300, seq_k=300, dim=128)
    whole = tessera.attention(q, k, v, mask="causal", batch_invariant=True).out
    for _ in range(5):
        assert torch.equal(tessera.attention(q, k, v, mask="causal", batch_invariant=True).out, whole)
    for begin, end in ((0, 1), (1, 70), (70, 203), (203, 300)):  # chunks of queries, each with the keys so far
        part = tessera.attention(
            q[1:2, begin:end], k[1:2, :end], v[1:2, :end], mask="causal", batch_invariant=True
        ).out
        assert torch.equal(part[0], whole[1, begin:end])


def test_runs_on_the_current_stream():
    q, k, v = tensors(dim=128)
    expected = tessera.attention(q, k, v).out
    side, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(20):
            busy = busy @ busy * 1e-3
        late.copy_(q)  # long after the call below was queued
        out = tessera.attention(late, k, v).out
    side.synchronize()
    assert torch.equal(out, expected)


def test_a_graph_replays_on_new_inputs():
    q, k, v = tensors(dim=128)
    out = torch.empty_like(q)
    tessera.attention(q, k, v, mask="causal", out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tessera.attention(q, k, v, mask="causal", out=out)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(out, tessera.attention(q, k, v, mask="causal").out)


def test_the_first_call_may_be_inside_a_capture():
    code = """
        import torch, tessera
        q, k, v = (torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        out = torch.empty_like(q)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tessera.attention(q, k, v, out=out)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, tessera.attention(q, k, v).out)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_a_new_thread_needs_no_context_of_its_own():
    q, k, v = tensors()
    expected, got = tessera.attention(q, k, v).out, []
    plan = tessera.plan(q, k, v)
    out = torch.empty_like(q)
    thread = threading.Thread(target=lambda: got.append(plan.run(q=q, k=k, v=v, out=out, stream=0)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert got and torch.equal(out, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_runs_where_the_tensors_are():
    first = tensors()
    second = [x.to("cuda:1") for x in first]
    assert torch.cuda.current_device() == 0
    out = tessera.attention(*second, mask="causal").out
    assert out.device == second[0].device
    assert torch.equal(out.cpu(), tessera.attention(*first, mask="causal").out.cpu())
    assert torch.cuda.current_device() == 0


def test_unsound_lengths_are_noted_and_left_out():
    """Of cu_seqlens and seqused: the status word says so, the neighbours' rows are as ever."""
    q = torch.randn(200, 2, 64, device="cuda", dtype=torch.bfloat16)
    ints = lambda *n: torch.tensor(n, device="cuda", dtype=torch.int32)  # noqa: E731
    sound = ints(0, 60, 130, 200)
    expected = tessera.attention(q, q, q, mask="causal", cu_seqlens_q=sound, cu_seqlens_k=sound).out
    for cu, used in (
        (ints(0, 60, 130, 201), None),  # past the rows
        (ints(0, 60, 50, 200), None),  # decreasing; the third sequence is longer than the bound
        (sound, ints(60, 71, 70)),
        (sound, ints(60, -1, 70)),
    ):
        status = ints(0)
        out = torch.full_like(q, 7)
        tessera.attention(
            q, q, q, mask="causal", cu_seqlens_q=cu, cu_seqlens_k=cu, max_len_q=70, max_len_k=70, seqused_k=used,
            status=status, out=out,
        )  # fmt: skip
        assert status.item() == 1
        assert torch.equal(out[:60], expected[:60])
    status = ints(0)
    tessera.attention(q, q, q, cu_seqlens_q=sound, cu_seqlens_k=sound, status=status)
    assert status.item() == 0


def as_on_cpu(call, *arrays, atol=3e-2):
    """Results of a call on CUDA tensors are those on the CPU, as far as two roundings of 16-bit numbers allow: what is exact
    is judged by `tessera check`, this by the eye for a wrong argument."""
    ours, theirs = (call(*[a if a is None else a.to(to) for a in arrays]) for to in ("cuda", "cpu"))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double().cpu(), other.double(), atol=atol, rtol=atol)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float32))
@pytest.mark.parametrize("dim", (40, 64, 128, 192))
def test_options_and_gradients_are_those_of_the_cpu(dtype, dim):
    q, k, v = tensors(dim=dim, dtype=dtype, seq_q=70, seq_k=90)
    torch.manual_seed(2)
    bias = torch.randn(1, 4, 70, 90, device="cuda", dtype=dtype)
    slopes, sinks = torch.rand(4, device="cuda"), torch.randn(4, device="cuda")
    dout = torch.randn_like(q)

    def call(q, k, v, bias, slopes, sinks, dout):
        inputs = [x.detach().requires_grad_() for x in (q, k, v, bias, slopes, sinks)]
        q, k, v, bias, slopes, sinks = inputs
        out, lse, plan = tessera.attention(
            q, k, v, mask="window(50,0)&causal", softcap=20.0, bias=bias, slopes=slopes, sinks=sinks, dropout=0.2, seed=7,
            return_lse=True,
        )  # fmt: skip
        assert plan.engine == ("cuda" if q.is_cuda else "cpu")
        return out, lse, *torch.autograd.grad(out, inputs, dout)

    as_on_cpu(call, q, k, v, bias, slopes, sinks, dout, atol=1e-3 if dtype == torch.float32 else 6e-2)


def test_plain_gradients_are_those_of_the_cpu():
    q, k, v = tensors(dim=128)
    dout = torch.randn_like(q)

    def call(q, k, v, dout):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = tessera.attention(*inputs, mask="causal").out
        return torch.autograd.grad(out, inputs, dout)

    as_on_cpu(call, q, k, v, dout, atol=6e-2)


@pytest.mark.parametrize("page", (None, 16))
def test_decoding_appends_and_attends(page):
    torch.manual_seed(3)
    batch, heads, kv, dim, slots = 3, 8, 2, 64, 256
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, new_k, new_v = make(batch, 1, heads, dim), make(batch, 1, kv, dim), make(batch, 1, kv, dim)
    store = (batch * slots // page, page) if page else (batch, slots)
    k, v = make(*store, kv, dim), make(*store, kv, dim)
    lens = torch.tensor([5, 200, 77], dtype=torch.int32, device="cuda")
    table = torch.randperm(store[0], device="cuda").int().view(batch, -1) if page else None

    def call(q, k, v, new_k, new_v, lens, table):
        k, v = k.clone(), v.clone()
        out = tessera.decode(q, k, v, k_new=new_k, v_new=new_v, cache_lens=lens, page_table=table).out
        return out, k, v

    as_on_cpu(call, q, k, v, new_k, new_v, lens, table)


def test_a_captured_decode_follows_the_lengths():
    torch.manual_seed(4)
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, k, v = make(2, 1, 8, 64), make(2, 4096, 2, 64), make(2, 4096, 2, 64)
    lens = torch.tensor([100, 4000], dtype=torch.int32, device="cuda")
    decode = lambda: tessera.decode(q, k, v, cache_lens=lens).out  # noqa: E731
    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode()
    for new in ([4096, 1], [17, 333]):
        lens.copy_(torch.tensor(new))
        graph.replay()
        torch.testing.assert_close(out, decode(), atol=1e-2, rtol=0)
        torch.testing.assert_close(out[:1], tessera.decode(q[:1], k[:1, : new[0]], v[:1, : new[0]]).out, atol=1e-2, rtol=0)


def test_what_it_does_not_answer_it_says():
    q, k, v = tensors()
    with pytest.raises(NotImplementedError, match="float64 is computed on processors only"):
        tessera.attention(q.double(), k.double(), v.double())
    with pytest.raises(ValueError, match="all arrays of a call are on one"):
        tessera.attention(q, k.cpu(), v)
    with pytest.raises(NotImplementedError):
        tessera.merge([q.detach()], [torch.zeros(2, 4, 130, device="cuda")])


def test_compiles():
    q, k, v = tensors(dim=128)
    attend = torch.compile(lambda q, k, v: tessera.attention(q, k, v, mask="causal").out * 2, fullgraph=True)
    assert torch.equal(attend(q, k, v), tessera.attention(q, k, v, mask="causal").out * 2)

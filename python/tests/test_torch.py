"""torch: gradients, the operators of torch.compile and export, devices and kinds of tensors."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
from tessera import Level, Mask  # noqa: E402

F = torch.nn.functional


def leaves(*shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


@pytest.fixture
def qkv():
    return leaves((2, 4, 4, 6), (2, 5, 2, 6), (2, 5, 2, 3))


# --------------------------------------------------------------------------------------------------------- gradients

CU = torch.tensor([0, 1, 4], dtype=torch.int32)
CU_K = torch.tensor([0, 3, 5], dtype=torch.int32)
OPTIONS = {
    "none": {},
    "causal": {"mask": "causal"},
    "top_left": {"mask": Mask.causal("top_left")},
    "window": {"mask": Mask.window(1, 1)},
    "prefix": {"mask": Mask.prefix(2)},
    "chunk": {"mask": Mask.chunk(2)},
    "first": {"mask": Mask.window(0, 0) & Mask.first(1)},
    "empty rows": {"mask": Mask.causal(-3)},
    "keep": {"mask": Mask.keep(torch.rand(2, 1, 4, 5, generator=torch.Generator().manual_seed(1)) < 0.6)},
    "exclude_keys": {"mask": Mask.exclude_keys(torch.tensor([[False, True, False, False, True], [True] * 5]))},
    "documents": {
        "mask": Mask.documents(
            torch.tensor([[0, 0, 1, 1], [0, 1, 1, -1]], dtype=torch.int32),
            torch.tensor([[0, 0, 1, 1, 1], [0, 0, 1, 1, 2]], dtype=torch.int32),
        )
    },
    "offsets": {"mask": Mask.causal(torch.tensor([0, 2], dtype=torch.int32))},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout": 0.3, "seed": 11, "offset": 3},
    "deterministic": {"deterministic": True},
    "batch_invariant": {"batch_invariant": True},
    "seqused": {
        "seqused_q": torch.tensor([4, 2], dtype=torch.int32),
        "seqused_k": torch.tensor([3, 5], dtype=torch.int32),
    },
    "threads": {"threads": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck(qkv, name):
    def call(*x):
        return tessera.attention(*x, return_lse=True, **OPTIONS[name])[:2]

    def finite(*x):  # lse of an empty row is -inf, which no difference survives
        out, lse = call(*x)
        return out, torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)

    assert torch.autograd.gradcheck(finite, qkv)


def test_gradcheck_of_scores():
    x = leaves((2, 4, 4, 6), (2, 5, 2, 6), (2, 5, 2, 3), (2, 1, 4, 5), (2, 4), (4,))

    def call(q, k, v, bias, slopes, sinks):
        r = tessera.attention(
            q, k, v, mask="causal", bias=bias, slopes=slopes, sinks=sinks, softcap=3.0, dropout=0.2, seed=1,
            return_lse=True, return_max_score=True,
        )  # fmt: skip
        return r.out, r.lse

    assert torch.autograd.gradcheck(call, x)
    for shape in ((1, 1, 1, 5), (1, 4, 4, 1)):
        x[3] = leaves(shape)[0]
        assert torch.autograd.gradcheck(call, x)


def test_gradcheck_packed_and_heads_first():
    q, k, v = leaves((4, 4, 6), (5, 2, 6), (5, 2, 3))
    packed = {"cu_seqlens_q": CU, "cu_seqlens_k": CU_K, "mask": Mask.window(3, 0)}
    assert torch.autograd.gradcheck(lambda *x: tessera.attention(*x, **packed).out, (q, k, v))
    q, k, v = leaves((2, 4, 4, 6), (2, 2, 5, 6), (2, 2, 5, 3))
    assert torch.autograd.gradcheck(lambda *x: tessera.attention(*x, layout="bhsd", mask="causal").out, (q, k, v))


def test_gradcheck_merge(qkv):
    q, k, v = qkv

    def call(q, k, v):
        parts = [tessera.attention(q, k[:, i:j], v[:, i:j], return_lse=True) for i, j in ((0, 2), (2, 5))]
        return tessera.merge([p.out for p in parts], [p.lse for p in parts])

    assert torch.autograd.gradcheck(call, (q, k, v))
    out, lse = call(q, k, v)
    whole = tessera.attention(q, k, v, return_lse=True)
    assert torch.allclose(out, whole.out) and torch.allclose(lse, whole.lse)


@pytest.mark.parametrize("wanted", range(1, 8))
def test_only_what_is_wanted(qkv, wanted):
    x = [t.detach().requires_grad_(bool(wanted >> n & 1)) for n, t in enumerate(qkv)]
    tessera.attention(*x).out.sum().backward()
    full = torch.autograd.grad(tessera.attention(*qkv).out.sum(), qkv)
    for t, g in zip(x, full):
        assert (t.grad is None) != t.requires_grad
        assert t.grad is None or torch.equal(t.grad, g)


def test_lse_alone_and_views(qkv):
    q, k, v = qkv
    r = tessera.attention(q, k, v, return_lse=True)
    dq, dv = torch.autograd.grad(r.lse.sum(), (q, v))
    assert dq.abs().sum() > 0 and torch.all(dv == 0)
    # Gradients that are spread out (from sum) and views of one buffer
    qkv_buffer = torch.randn(2, 5, 8, 6, dtype=torch.float64, requires_grad=True)
    parts = qkv_buffer[:, :, :4], qkv_buffer[:, :, 4:6], qkv_buffer[:, :, 6:]
    tessera.attention(*parts, mask="causal").out.sum().backward()
    copies = [p.detach().clone().requires_grad_() for p in parts]
    tessera.attention(*copies, mask="causal").out.sum().backward()
    assert torch.equal(qkv_buffer.grad, torch.cat([c.grad for c in copies], 2))


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 5e-3)])
def test_agrees_with_sdpa(dtype, bound):
    q, k, v = leaves((2, 4, 33, 32), (2, 4, 33, 32), (2, 4, 33, 32), dtype=dtype)
    ours = tessera.attention(q, k, v, layout="bhsd", mask="causal").out
    peer = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert ours.dtype == dtype and (ours - peer).abs().max() < bound
    g = torch.randn_like(peer)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), g), torch.autograd.grad(peer, (q, k, v), g)):
        assert a.dtype == dtype and (a - b).abs().max() < 4 * bound


def test_second_derivatives_are_refused(qkv):
    out = tessera.attention(*qkv).out
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(out.sum(), qkv, create_graph=True)


def test_a_changed_input_is_noticed(qkv):
    q, k, v = qkv
    out = tessera.attention(q, k, v).out
    with torch.no_grad():
        k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_modules_train():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(16, 48)
            self.sinks = torch.nn.Parameter(torch.zeros(4))

        def forward(self, x):
            q, k, v = self.project(x).unflatten(-1, (12, 4)).chunk(3, 2)
            return tessera.attention(q, k, v, mask="causal", sinks=self.sinks).out.flatten(2)

    torch.manual_seed(0)
    layer = Layer()
    x, target = torch.randn(2, 9, 16), torch.randn(2, 9, 16)
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0] and layer.sinks.grad.abs().sum() > 0


# ----------------------------------------------------------------------------------------------------------- compile

compiles = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 4), reason="torch.library of 2.4"
)


@compiles
def test_compile_without_graph_breaks_and_without_compiling_again():
    from torch._dynamo.testing import CompileCounterWithBackend

    mask = Mask.causal() & Mask.window(8, 0)

    def call(q, k, v, s):
        r = tessera.attention(q, k, v, mask=mask, sinks=s, return_lse=True)
        return r.out * 2, r.lse

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for n in (5, 6, 7, 12, 33):
        x = leaves((2, n, 4, 8), (2, n, 2, 8), (2, n, 2, 8), (4,), dtype=torch.float32, seed=n)
        got, want = compiled(*x), call(*x)
        assert all(torch.equal(a, b) for a, b in zip(got, want))
        total = [sum(y.sum() for y in ys) for ys in (got, want)]
        for a, b in zip(torch.autograd.grad(total[0], x), torch.autograd.grad(total[1], x)):
            assert torch.allclose(a, b, atol=1e-6)
    assert counter.frame_count <= 2  # once for the first length, once for all others


@compiles
def test_compile_packed_lengths_are_data():
    from torch._dynamo.testing import CompileCounter

    def call(q, k, v, cu, longest):
        return tessera.attention(
            q, k, v, mask="causal", cu_seqlens_q=cu, cu_seqlens_k=cu, max_len_q=longest, max_len_k=longest
        ).out

    counter = CompileCounter()
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for n in (3, 5, 8, 9):
        x = [torch.randn(2 * n, 4, 8) for _ in range(3)]
        cu = torch.tensor([0, n, 2 * n], dtype=torch.int32)
        assert torch.equal(compiled(*x, cu, n), call(*x, cu, n))
    assert counter.frame_count <= 2


@compiles
def test_compile_with_options_that_change():
    class Layer(torch.nn.Module):
        def __init__(self, scale, left):
            super().__init__()
            self.scale, self.left = scale, left

        def forward(self, q, k, v):
            return tessera.attention(q, k, v, scale=self.scale, softcap=2 + self.scale, mask=f"window({self.left},0)").out

    q, k, v = leaves((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), dtype=torch.float32)
    spells = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)  # 2.4 spells a changing number as "s0"
    for scale, left in ((0.1, 2), (0.2, 3), (0.3, 4)):
        layer = Layer(scale, left if spells else 2)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(q, k, v), layer(q, k, v))
    for dynamic in (True, None):
        call = torch.compile(lambda q, k, v: tessera.attention(q, k, v).out, fullgraph=True, dynamic=dynamic, backend="eager")
        assert torch.equal(call(q, k, v), tessera.attention(q, k, v).out)


@compiles
def test_compile_decode_writes_the_cache():
    def call(q, k, v, k_new, v_new, lens):
        tessera.append(k, v, k_new, v_new, cache_lens=lens)
        return tessera.decode(q, k, v, k_new=k_new, v_new=v_new, cache_lens=lens + 1, mask="causal").out

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    q, k_new, v_new = torch.randn(3, 1, 4, 8), torch.randn(3, 1, 2, 8), torch.randn(3, 1, 2, 8)
    lens = torch.tensor([0, 3, 7], dtype=torch.int32)
    caches = [[torch.zeros(3, 16, 2, 8) for _ in range(2)] for _ in range(2)]
    with torch.no_grad():
        got, want = compiled(q, *caches[0], k_new, v_new, lens), call(q, *caches[1], k_new, v_new, lens)
    assert torch.equal(got, want)
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(*caches))


@compiles
def test_export_with_any_length():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return tessera.attention(q, k, v, mask="causal", layout="bhsd").out

    x = torch.randn(2, 4, 6, 8)
    length = torch.export.Dim("length", min=2, max=1024)
    program = torch.export.export(Model(), (x, x, x), dynamic_shapes={n: {2: length} for n in "qkv"})
    assert any("tessera.attention" in str(node.target) for node in program.graph.nodes)
    y = torch.randn(2, 4, 11, 8)
    assert torch.equal(program.module()(y, y, y), Model()(y, y, y))


@compiles
def test_operators_say_what_they_do():
    import tessera.ops

    options = tessera.ops.spell(tessera.calls.Options(lse=True))
    x = leaves((2, 6, 4, 8), (2, 6, 4, 8), (2, 6, 4, 8), dtype=torch.float32)
    torch.library.opcheck(torch.ops.tessera.attention.default, (*x, *[None] * 12, options, None, None, 0.0, 0, None, None, 0, 0))
    assert "Tensor(a!) k, Tensor(b!) v" in str(torch.ops.tessera.append.default._schema)
    assert "Tensor(a!) k, Tensor(b!) v" in str(torch.ops.tessera.decode.default._schema)


@compiles
def test_trace_sees_compiled_calls():
    compiled = torch.compile(lambda q: tessera.attention(q, q, q).out, fullgraph=True, backend="aot_eager")
    q = torch.randn(1, 4, 2, 8)
    compiled(q)
    with tessera.trace() as trace:
        compiled(q)
    assert [c["call"] for c in trace.calls] == ["attention (compiled)"]


# ------------------------------------------------------------------------------------------------- kinds and refusals


def test_numpy_and_torch_give_the_same_bits(qkv):
    x = [t.detach().float() for t in qkv]
    a = tessera.attention(*x, mask="causal").out
    b = tessera.attention(*(t.numpy() for t in x), mask="causal").out
    assert isinstance(b, np.ndarray) and np.array_equal(a.numpy(), b)


def test_caches_of_torch():
    k, v = torch.zeros(2, 8, 1, 16, dtype=torch.bfloat16), torch.zeros(2, 8, 1, 16, dtype=torch.bfloat16)
    q, new = torch.randn(2, 1, 2, 16, dtype=torch.bfloat16), torch.randn(2, 1, 1, 16, dtype=torch.bfloat16)
    lens = torch.tensor([0, 4], dtype=torch.int32)
    r = tessera.decode(q, k, v, k_new=new, v_new=new, cache_lens=lens, mask="causal")
    assert torch.equal(k[1, 4], new[1, 0]) and torch.equal(r.out[0, 0, 0], new[0, 0, 0])
    if hasattr(torch, "float8_e4m3fn"):
        k8 = torch.randn(2, 8, 1, 16).to(torch.float8_e4m3fn)
        r = tessera.decode(q, k8, k8, cache_lens=lens + 1)
        assert torch.equal(r.out[0, 0, 0], k8[0, 0, 0].to(torch.bfloat16))
    c = tessera.cascade(q[:, 0], [Level(k[:1, :3], v[:1, :3])])
    assert c.out.shape == (2, 2, 16)


def test_nothing_is_copied(qkv):
    """The largest copy of an input would show in the process's memory: none is made of a last dimension with steps."""
    x = torch.randn(1, 8, 1, 64)[..., ::2]
    r = tessera.attention(x, x, x)
    assert r.plan.bytes_read == 3 * 8 * 32 * 4  # each operand once, as it lies
    assert torch.allclose(r.out, tessera.attention(*[x.contiguous()] * 3).out)


def test_refusals(qkv):
    q, k, v = (t.detach() for t in qkv)

    def rejects(kind, text, call):
        with pytest.raises(kind, match=text):
            call()

    a = tessera.attention
    rejects(ValueError, "k.dtype is f32; it must be q's, f64", lambda: a(q, k.float(), v))
    rejects(ValueError, "q has dtype torch.int64", lambda: a(q.long(), k, v))
    rejects(NotImplementedError, "q has no plain memory", lambda: a(q.to("meta"), k, v))
    rejects(NotImplementedError, "k has no plain memory", lambda: a(q, k.to_sparse(), v))
    rejects(ValueError, "out is given, but", lambda: a(*qkv, out=torch.empty(2, 4, 4, 3, dtype=q.dtype)))
    rejects(ValueError, "negative bit", lambda: a(torch.randn(2, 4, 4, 6, dtype=torch.complex128).conj().imag, k, v))
    rejects(ValueError, "mask is a Tensor", lambda: a(q, k, v, mask=torch.ones(4, 5, dtype=torch.bool)))
    rejects(ValueError, "scale is a Tensor", lambda: a(q, k, v, scale=torch.tensor(1.0)))
    rejects(ValueError, "cu_seqlens_q has dtype torch.int64", lambda: a(q[0], k, v, cu_seqlens_q=torch.tensor([0, 4])))
    rejects(ValueError, "requires gradients.*no_grad", lambda: tessera.decode(*qkv))
    if torch.cuda.is_available():
        rejects(ValueError, "k is on cuda:0 and q on cpu", lambda: a(q, k.cuda(), v))
    func = getattr(torch, "func", None)
    rejects(NotImplementedError, "vmap", lambda: func.vmap(lambda t: a(t, t, t).out)(torch.randn(3, 1, 4, 2, 8)))


def test_what_is_written_is_known_to_autograd():
    w, cache = torch.ones(2, 8, 1, 4, requires_grad=True), torch.randn(2, 8, 1, 4)
    y = (w * cache).sum()
    new = torch.randn(2, 1, 1, 4)
    tessera.append(cache, cache.clone(), new, new, cache_lens=torch.tensor([3, 5], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    before, status = cache._version, torch.zeros(1, dtype=torch.int32)
    lens = torch.tensor([3, 5], dtype=torch.int32)
    tessera.decode(new, cache, cache, cache_lens=lens, status=status)
    assert cache._version == before and status._version == 1  # a decode without new tokens writes no cache
    tessera.cascade(new[:, 0], [Level(cache, cache, cu_seqlens_q=torch.arange(3, dtype=torch.int32), cache_lens=lens)])
    assert cache._version == before
    with pytest.raises(ValueError, match="k of level 0 is a ndarray"):
        other = Level(cache[:1, :3], cache[:1, :3])
        tessera.cascade(new[:, 0], [Level(cache[:1].numpy(), cache[:1].numpy()), other])
    out = torch.empty(2, 8, 1, 4)
    tessera.attention(cache, cache, cache, out=out)
    assert out._version == 1
    with pytest.raises(ValueError, match="out is given, but"):
        tessera.attention(cache, cache, cache, out=out.requires_grad_())


def test_gradients_are_never_dropped_in_silence(qkv):
    q, k, v = (t.detach() for t in qkv)
    lens = torch.tensor([3, 4], dtype=torch.int32)
    x = q[:, :1].clone().requires_grad_()
    for call in (
        lambda: tessera.decode(x, k, v, cache_lens=lens),
        lambda: tessera.cascade(x[:, 0], [Level(k[:1], v[:1])]),
        lambda: torch.compile(lambda x: tessera.decode(x, k, v, cache_lens=lens).out, backend="eager", fullgraph=True)(x),
        lambda: tessera.attention(q.numpy(), k.clone().requires_grad_(), v),
    ):
        with pytest.raises((ValueError, torch._dynamo.exc.Unsupported)):
            call()
    import torch.autograd.forward_ad as forward_ad

    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="tangent"):
        tessera.attention(forward_ad.make_dual(q, q), k, v)


def test_one_library_a_call(qkv):
    q, k, v = (t.detach() for t in qkv)
    with pytest.raises(ValueError, match="k is a ndarray and q a torch tensor"):
        tessera.attention(q, k.numpy(), v)
    with pytest.raises(ValueError, match="v is a torch tensor and q a ndarray"):
        tessera.attention(q.numpy(), k.numpy(), v)
    with pytest.raises(ValueError, match="one library"):
        tessera.attention(q.requires_grad_(), k.numpy(), v)


def test_no_kernel_of_float64_is_hidden(qkv):
    with tessera.trace() as trace:
        tessera.attention(*qkv).out.sum().backward()
    assert [c["call"] for c in trace.calls] == ["attention", "attention backward"]
    assert all(c["line"].split()[1] == "f64" for c in trace.calls)


def test_imports_without_torch_stay_without_torch():
    import subprocess
    import sys

    code = "import sys, numpy, tessera; x = numpy.ones((1, 2, 1, 4)); tessera.attention(x, x, x); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

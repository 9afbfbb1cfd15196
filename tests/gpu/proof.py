"""What the proofs are made of: a problem line with its operands, each in memory of its own that is watched, and the float64
answers that it is judged by.

The proofs, the test files beside this one, are what a GPU must show once, beside `tessera check` and
python/tests/test_cuda.py. docs/gpu/CASES.md says which case is proven by what. `scripts/gpu-test proofs` runs them; they
take 80 GB of a GPU's memory.

TESSERA_PROOF_DEVICE=cpu runs the same tests, with small numbers, on the processor: a test of the tests.
"""

import hashlib
import math
import os
import re
import zlib

import pytest

torch = pytest.importorskip("torch")
DEVICE = os.environ.get("TESSERA_PROOF_DEVICE", "cuda:0")
ON_GPU = DEVICE != "cpu"
if ON_GPU and not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import tessera  # noqa: E402
from tessera import _tessera  # noqa: E402
from tessera.problem import NAMES  # noqa: E402
from tessera.torch import DTYPES  # noqa: E402

FAR = 2**32 if ON_GPU else 2**20  # elements
PORTABLE = "cuda.portable,cuda.portable_backward,cuda.general"
BACKWARD_INPUTS = ("dout", "dlse", "documents_q", "documents_k")


def planned(problem, kernels, device=DEVICE):
    problem = _tessera.Problem(problem) if isinstance(problem, str) else problem
    return _tessera.Plan(problem, device if ON_GPU else "host", kernels)


def answered(kernels):
    return {planned(f"{way} bf16 h1 q64 k64 d64", kernels).kernel for way in ("forward", "backward")}


def kernels_to_prove():
    """The plan's choice; the portable ones, where others are chosen; last the one that takes all."""
    if not ON_GPU:
        return "cpu", "cpu.baseline"
    return ("cuda", PORTABLE, "cuda.general") if answered("cuda") != answered(PORTABLE) else ("cuda", "cuda.general")


KERNELS = kernels_to_prove()
gpu_only = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
by_each = pytest.mark.parametrize("kernels", KERNELS)


def synchronize():
    if ON_GPU:
        torch.cuda.synchronize()


def stream_of(device):
    return torch.cuda.current_stream(device).cuda_stream if ON_GPU else None


@pytest.fixture(autouse=True)
def give_back():
    """What one test took of the GPU the next may need."""
    yield
    if ON_GPU and torch.cuda.memory_reserved() > 40 * 2**30:
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------------------- cases


class Case:
    """A problem line with its operands: inputs that are a function of name and place alone, or those of another case; each
    in memory of its own, which elsewhere is 0xFF, as results are before a run. Tensors are (batch, sequence, head, dim)."""

    def __init__(self, line, like=None, device=DEVICE, given=None):
        self.line, self.device, self.problem = line, device, _tessera.Problem(line)
        self.operands, self.arrays, self.storage, self.callers = self.problem.operands(), {}, {}, {}
        backward = line.startswith("backward")
        self.results = [
            n for n in self.operands
            if (n[0] == "d" and n not in BACKWARD_INPUTS) or (not backward and n in ("out", "lse", "max_score"))
        ]  # fmt: skip
        self.updates = [n for n in ("k", "v") if "k_new" in self.operands]
        for name, (dtype, extents, strides) in self.operands.items():
            if given and name in given:
                self.arrays[name] = given[name]
            elif name == "v" and self.problem.v_in_k:
                self.arrays[name] = self.arrays["k"][..., : extents[3]]
            else:
                self.place(name, DTYPES[_tessera.DTYPES[dtype]], extents, strides)
                if like:
                    self.arrays[name].copy_(like.arrays[name])
                elif name not in self.results and not (backward and name in ("out", "lse")):
                    self.fill(name, self.arrays[name])
        if like:
            self.erase()
        elif backward and given is None:
            self.attend()

    def place(self, name, dtype, extents, strides):
        span = 1 + sum((n - 1) * step for n, step in zip(extents, strides)) if math.prod(extents) else 0
        size = torch.empty(0, dtype=dtype).element_size()
        # 64 bytes behind it, so that a write past its end shows.
        memory = torch.full((-(-span * size // 8) * 8 + 64,), 0xFF, dtype=torch.uint8, device=self.device)
        self.storage[name] = memory
        self.arrays[name] = memory.view(dtype).as_strided(extents, strides)

    def fill(self, name, x):
        seeded = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        new = lambda dtype=torch.float32: torch.empty(x.shape, dtype=dtype, device=self.device)  # noqa: E731
        values, p = self.problem.values(NAMES[name]), self.problem
        if values:
            x.copy_(torch.tensor(values, dtype=torch.int32).view(x.shape))
        elif name == "cache_lens":
            x.fill_(p.len_k - p.len_new)
        elif name == "page_table":
            x.copy_(torch.randperm(p.pages, generator=seeded, device=self.device)[: x.numel()].view(x.shape))
        elif name.startswith("documents"):
            x.copy_((torch.arange(x.shape[1], device=self.device) * 4 // x.shape[1]).view(1, -1, 1, 1).expand(x.shape))
        elif x.dtype == torch.int32:  # status, corners
            x.zero_()
        elif x.dtype == torch.bool:
            x.copy_(new(torch.bool).bernoulli_(0.7 if name == "keep" else 0.25, generator=seeded))
        elif name in ("cos", "sin"):
            angles = torch.arange(x.shape[1]).view(1, -1, 1, 1) * 0.1 ** torch.arange(x.shape[3]).view(1, 1, 1, -1)
            x.copy_(getattr(torch, name)(angles))
        elif name in ("k_scale", "v_scale", "slopes"):
            x.copy_(new().uniform_(0.1, 1, generator=seeded))
        else:
            x.copy_(new(torch.float32 if x.dtype == torch.float8_e4m3fn else x.dtype).normal_(generator=seeded))

    def attend(self, kernels=KERNELS[0]):
        """out and lse, which backward reads, by the forward pass."""
        words = [w for w in self.line.split() if w not in ("dlse", "deterministic")]
        ours = lambda m: m[0] if m[1] in ("q", "k", "v", "out", "lse", "bias", "keep") else ""  # noqa: E731
        words = [re.sub(r"(\w+)\[[\d,]+\]", ours, w) if w.startswith("strides=") else w for w in words]
        line = " ".join(["forward", *(w for w in words[1:] if w != "strides=")])
        Case(line, device=self.device, given=self.arrays).run(kernels)

    def run(self, kernels=KERNELS[0], rubbish=-1, memory=None):
        """On the current stream, in a workspace of its own whose words are `rubbish`, or in `memory`."""
        if memory is not None or (kernels, rubbish) not in self.callers:
            plan = planned(self.problem, kernels, self.device)
            words = -(-plan.workspace_bytes // 4)
            full = (0, torch.full, ((words,), rubbish), {"dtype": torch.int32, "device": self.device})
            made = plan, (), full if memory is None else (0, memory.view, (memory.shape,), {})
            caller = _tessera.Caller(tuple(NAMES[n] for n in self.arrays), lambda *_: made)
            self.callers[kernels, rubbish] = plan, caller
        self.plan, caller = self.callers[kernels, rubbish]
        caller.call(tuple(self.arrays.values()), self.problem.seed, self.problem.offset, stream_of(self.device))
        return self

    def erase(self):
        for name in self.results:
            ints_of(self.arrays[name]).fill_(-1)

    def exact(self):
        """The results whose bits must repeat: the fast backward kernels add dQ in no fixed order."""
        free = {"dq"} if self.plan.kernel.startswith("cuda") and self.plan.kernel != "cuda.general" else set()
        return {n: self.arrays[n] for n in (*self.results, *self.updates) if n not in free}

    def bits(self):
        return {n: ints_of(x.contiguous().clone()) for n, x in self.exact().items()}

    def digest(self):
        state = hashlib.sha256()
        for x in self.bits().values():
            state.update(x.reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
        return state.hexdigest()

    def nothing_else_written(self, name):
        """No byte of its memory, which forgets the tensor itself."""
        ints_of(self.arrays[name]).fill_(-1)
        return bool((self.storage[name].view(torch.int64) == -1).all())


def skip_if_proven(line, kernels):
    """Where words before it lead to the same kernel."""
    if planned(line, kernels).kernel in {planned(line, k).kernel for k in KERNELS[: KERNELS.index(kernels)]}:
        pytest.skip("the plan's own choice")


def ints_of(x):
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name].to(one[name].device)), name


def reference(arrays, causal=False, scale=None, drop=None, softcap=0):
    """float64, in pieces: what forward and, where dout is among the arrays, backward (which has no softcap here) return of a
    dense problem."""
    shape, heads_kv, keys = arrays["q"].shape, arrays["k"].shape[2], arrays["k"].shape[1]
    batch, rows, heads, dim = shape
    group, scale, backward = heads // heads_kv, scale or dim**-0.5, "dout" in arrays
    names = ("out", "lse", "dq", "dk", "dv") if backward else ("out", "lse")
    made = {n: torch.zeros(arrays[n].shape, dtype=torch.float64, device=DEVICE) for n in names if n in arrays}
    step = heads_kv if batch * heads * rows * keys < 2**26 else 1  # KV heads
    for kv in range(0, heads_kv, step):
        h, of_kv = slice(kv * group, (kv + step) * group), slice(kv, kv + step)
        k, v = (arrays[n][:, :, of_kv].double().transpose(1, 2).repeat_interleave(group, 1) for n in ("k", "v"))
        at_once = max(1, 2**27 // max(1, batch * step * group * keys))
        for r in (slice(n, min(rows, n + at_once)) for n in range(0, rows, at_once)):
            all_of = slice(None)
            of_pairs = lambda x: x[:, h if x.shape[1] > 1 else all_of, r if x.shape[2] > 1 else all_of]  # noqa: E731, B023
            q = arrays["q"][:, r, h].double().transpose(1, 2)
            s = q @ k.mT * scale
            if softcap:
                s = softcap * torch.tanh(s / softcap)
            if "bias" in arrays:
                s += of_pairs(arrays["bias"])
            if "keep" in arrays:
                s.masked_fill_(~of_pairs(arrays["keep"]), -math.inf)
            if causal:
                at = torch.arange(r.start, r.stop, device=DEVICE)[:, None] + keys - rows
                s.masked_fill_(torch.arange(keys, device=DEVICE) > at, -math.inf)
            sink = of_pairs(arrays["sinks"].double().transpose(1, 2)) if "sinks" in arrays else s.new_tensor(-math.inf)
            largest = torch.maximum(s.amax(-1, keepdim=True), sink).clamp_min(-1e300)
            weight = s.sub_(largest).exp_()
            total = weight.sum(-1, keepdim=True) + torch.exp(sink - largest)
            lse = largest + torch.log(total)
            weight /= total.clamp_min(1)  # 0 where there is no key
            kept = weight if drop is None else weight * of_pairs(drop)
            out = kept @ v
            made["out"][:, r, h] = out.transpose(1, 2)
            if "lse" in made:
                made["lse"][:, r, h] = lse.transpose(1, 2)
            if backward:
                dout = arrays["dout"][:, r, h].double().transpose(1, 2)
                dp = dout @ v.mT if drop is None else dout @ v.mT * of_pairs(drop)
                ds = weight * (dp - (dout * out).sum(-1, keepdim=True)) * scale
                made["dq"][:, r, h] = (ds @ k).transpose(1, 2)
                for name, x in (("dk", ds.mT @ q), ("dv", kept.mT @ dout)):
                    made[name][:, :, of_kv] += x.unflatten(1, (-1, group)).sum(2).transpose(1, 2)
    return made


# Of the largest: a wrong row, mask or offset is far beyond it; what is exact `tessera check` judges.
WITHIN = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 3e-4}


def assert_close(arrays, expected):
    for name, x in expected.items():
        ours = arrays[name].double()
        assert torch.equal(ours.isneginf(), x.isneginf()), name
        x, ours = (y.masked_fill(x.isneginf(), 0) for y in (x, ours))
        bound = 1e-3 + 1e-5 * x.abs().max() if name == "lse" else WITHIN[arrays[name].dtype] * x.abs().max()
        assert (ours - x).abs().max() <= bound, (name, (ours - x).abs().max().item(), x.abs().max().item())

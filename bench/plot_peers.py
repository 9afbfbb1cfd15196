#!/usr/bin/env python3
"""Draws what bench/gpu_peers.py measured: shares of the matrix product by length, a panel for each dim and mask.

    python bench/plot_peers.py JSON OUT.svg
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

WIDTH, HEIGHT, GAP_X, GAP_Y = 240, 180, 34, 56  # of a panel, and to the next
LEFT, TOP, RIGHT, BOTTOM = 52, 78, 16, 46
INK, SOFT, GRID = "#333333", "#666666", "#e2e2e2"


class Style(NamedTuple):
    colour: str
    width: float
    mark: str  # a path around 0,0


# Told apart by shape as well as by colour.
STYLES = {
    "FA2": Style("#8c8c8c", 1.5, "M-3.2 2.8h6.4L0 -3.4z"),
    "cuDNN": Style("#b5651d", 1.5, "M-2.8 -2.8h5.6v5.6h-5.6z"),
    "FA3": Style("#4d7f52", 1.5, "M0 -3.8L3.8 0L0 3.8L-3.8 0z"),
    "tessera": Style("#1b5e9e", 2.5, "M-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0 -6.8 0z"),
}
NAMES = {"tessera": "Tessera", "FA2": "FlashAttention-2", "FA3": "FlashAttention-3"}


def text(x, y, words, anchor="middle", colour=INK, more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{more}>{words}</text>'


def line(x1, y1, x2, y2, colour=GRID):
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}"/>'


def curve(points, style, dashed):
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="5 3"' if dashed else ""
    marks = "".join(f'<path transform="translate({x:.1f} {y:.1f})" d="{style.mark}"/>' for x, y in points)
    drawn = f'<path d="M{path}" fill="none" stroke="{style.colour}" stroke-width="{style.width}"{dash}/>'
    return drawn + f'<g fill="{style.colour}" stroke="#ffffff" stroke-width="0.8">{marks}</g>'


def short(length):
    return f"{length // 1024}k" if length >= 1024 else str(length)


def panel(x, y, title, cells, lengths, top, edge):
    """edge: of the leftmost, which alone says what the heights are."""
    at_x = lambda n: x + WIDTH * (lengths.index(n) + 0.5) / len(lengths)  # noqa: E731
    at_y = lambda share: y + HEIGHT * (1 - share / top)  # noqa: E731
    parts = [text(x, y - 9, title, "start", more=' font-weight="600"')]
    for tenth in range(0, round(top * 10) + 1, 2):
        parts.append(line(x, at_y(tenth / 10), x + WIDTH, at_y(tenth / 10), SOFT if tenth in (0, 10) else GRID))
        if edge:
            parts.append(text(x - 7, at_y(tenth / 10) + 4, f"{tenth / 10:.1f}", "end", SOFT))
    parts += [text(at_x(n), y + HEIGHT + 17, short(n), colour=SOFT) for n in lengths]
    for name, style in STYLES.items():
        points = [(at_x(c["length"]), at_y(c["share"][name])) for c in cells if name in c["share"]]
        parts.append(curve(points, style, any(name not in c["speed"] for c in cells)) if points else "")
    return "".join(parts)


def legend(cells, x, y):
    parts = []
    for name, style in reversed(STYLES.items()):
        if not any(name in c["share"] for c in cells):
            continue
        elsewhere = any(name not in c["speed"] for c in cells)
        words = NAMES.get(name, name) + (" (on another H200)" if elsewhere else "")
        parts += [curve([(x, y), (x + 26, y)], style, elsewhere), text(x + 34, y + 4, words, "start")]
        x += 58 + 6.8 * len(words)
    return "".join(parts)


def draw(cells):
    """The picture of gpu_peers.py's cells; on white, so that any page may hold it."""
    dims, lengths = (sorted({c[key] for c in cells}) for key in ("dim", "length"))
    masks = sorted({c["causal"] for c in cells})
    top = max(1.0, *(share for c in cells for share in c["share"].values())) + 0.02
    end = LEFT + len(dims) * (WIDTH + GAP_X) - GAP_X
    wide = max(end, LEFT + 624) + RIGHT  # the legend's width
    high = TOP + len(masks) * (HEIGHT + GAP_Y) - GAP_Y + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12">',
        "<title>Forward: shares of a matrix product's rate, by length</title>",
        f'<rect width="{wide}" height="{high}" fill="#ffffff"/>',
        text(LEFT, 20, "bf16 forward, 16k tokens, hidden 2048: share of an 8192³ matrix product", "start"),
        legend(cells, LEFT, 40),
    ]
    for row, causal in enumerate(masks):
        for column, dim in enumerate(dims):
            here = sorted((c for c in cells if (c["dim"], c["causal"]) == (dim, causal)), key=lambda c: c["length"])
            x, y = LEFT + column * (WIDTH + GAP_X), TOP + row * (HEIGHT + GAP_Y)
            title = f"dim {dim}, {'causal' if causal else 'full'}"
            parts.append(panel(x, y, title, here, lengths, top, column == 0))
    parts += [text((LEFT + end) / 2, high - 8, "length", colour=SOFT), "</svg>"]
    return "\n".join(parts) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("out", type=Path)
    a = parser.parse_args()
    a.out.write_text(draw(json.loads(a.json.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()

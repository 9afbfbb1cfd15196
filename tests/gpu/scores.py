"""What test_scores.py is made of: cases whose scores are set by hand, q and k being whole numbers times powers of two, so
that every product is exact; float64 has the answer."""

import math

import torch
from proof import Case, DEVICE, reference, skip_if_proven

# Whether a key at j is seen from a position.
MASKS = {
    "none": lambda j, at: j > at - 2**30,
    "causal": lambda j, at: j <= at,
    "window(100,30)": lambda j, at: (at - 100 <= j) & (j <= at + 30),
    "causal&window(150,0)&first(5)": lambda j, at: (j <= at) & ((at - 150 <= j) | (j < 5)),
    "chunk(150)": lambda j, at: j // 150 == at // 150,
}
# Of what weighs in: a weight and the result are each rounded to the dtype, by at most half of this, half more to spare.
ROUNDED = {torch.bfloat16: 1.5 * 2**-7, torch.float16: 1.5 * 2**-10}
EVERY = slice(None)


def row(numbers):
    """(batch, row or key, head) from a number a row or key."""
    return torch.as_tensor(numbers, dtype=torch.float64, device=DEVICE).view(1, -1, 1)


def nearest_power(x):
    return 2.0 ** round(math.log2(x))


class Scores(Case):
    """A case whose scores spread by about 1; some dims are left for `score`. Keys lie in `dense`, also those in pages."""

    def __init__(self, line, kernels):
        skip_if_proven(line, kernels)
        super().__init__(line)
        p = self.problem
        self.kernels, self.scale = kernels, p.scale if p.has_scale else p.dim**-0.5
        for name, unit in (("q", nearest_power(1 / (self.scale * p.dim**0.5))), ("k", 1)):
            self.arrays[name].copy_(self.arrays[name].float().round().clamp(-3, 3) * unit)
        self.dense = {n: self.arrays[n][self.slots()][None] if p.page_size else self.arrays[n] for n in ("k", "v")}
        self.rows, self.keys = (torch.arange(x.shape[1], device=DEVICE) for x in (self.arrays["q"], self.dense["k"]))
        self.heads = torch.arange(p.heads_q, device=DEVICE)
        for part in range(3):
            self.score(row(self.rows * 0), row(self.keys * 0), part)

    def slots(self):
        """Where the keys of one sequence lie in pages."""
        at, table = torch.arange(self.problem.len_k, device=DEVICE), self.arrays["page_table"].view(-1).long()
        return table[at // self.problem.page_size], at % self.problem.page_size

    def score(self, rows, keys, part=0, alone=False):
        """A row and a key score rows x keys x scale besides, in three dims, of which there are three parts. Keys are whole
        numbers below 2^24, a digit in each dim; rows have few bits. alone: rows that are not 0 have no other scores."""
        q, k, dim, left = self.arrays["q"], self.dense["k"], self.problem.dim, keys.abs().long()
        if alone:
            q.masked_fill_((rows != 0)[..., None], 0)
        for n, d in enumerate((3 * part, dim // 2 + part, dim - 1 - part)):
            q[..., d] = rows * 256**n if left.any() else 0
            k[..., d] = left % 256 * keys.sign()
            left = left // 256

    def sees(self, mask, rows, keys):
        """(1, 1, row, key)"""
        at = torch.arange(rows, device=DEVICE)[:, None] + keys - rows
        return MASKS[mask](torch.arange(keys, device=DEVICE), at)[None, None]

    def run(self):
        if self.problem.page_size:
            self.arrays["k"][self.slots()] = self.dense["k"][0]
        return super().run(self.kernels)

    def mix(self):
        """Rows of eight kinds by turns, in each head a step further: ordinary; with scale=2 all scores about -1e7, or 1e7;
        growing slowly with the key, falling fast; three keys at 1.5e7, or at -1.5e7 and the others falling; growing fast but
        for these three."""
        kind = (self.rows[:, None] + self.heads) % 8
        by_kind = lambda *values: torch.tensor(values, dtype=torch.float64, device=DEVICE)[kind][None]  # noqa: E731
        last = len(self.keys) - 1
        three = (self.keys == 7) | (self.keys == last // 2) | (self.keys == last - 8)
        self.dense["k"][:, three] = 0
        self.score(by_kind(0, -0.5, 0.5, 0, 0, 0, 0, 0), row(10**7 + self.keys * 7 % 23), 0, alone=True)
        self.score(by_kind(0, 0, 0, 2**-3, -1, 0, -(2**-3), 1), row(self.keys), 1)
        self.score(by_kind(0, 0, 0, 0, 0, 0.5, -0.5, -(2**-10)), row(three * 15 * 10**6), 2)
        return self

    def judge(self, mask="none", of=(EVERY, EVERY, EVERY), but=None, drop=None, softcap=0, **pairs):
        """Against float64. of: which batches, rows and keys; but: rows, by batch and head, of which nothing is said."""
        b, q, k = of
        ours = {n: self.arrays[n][b, q] for n in ("q", "out", "lse")}
        keys, values = (self.dense[n][b, k] for n in ("k", "v"))
        pairs["keep"] = self.sees(mask, len(self.rows[q]), len(self.keys[k])) & pairs.get("keep", True)
        sizes = torch.cat((values, values.abs()), -1)  # and how much weighs in
        given = {**ours, "k": keys, "v": sizes, "out": sizes.new_empty((*ours["out"].shape[:3], sizes.shape[3])), **pairs}
        made = reference(given, scale=self.scale, drop=drop, softcap=softcap)
        out, size = made["out"].chunk(2, -1)
        for name, x, bound in (
            ("out", out, ROUNDED[ours["out"].dtype] * size + 1e-6),
            ("lse", made["lse"].float(), 1e-4 + 1e-6 * made["lse"].abs()),
        ):
            off = (ours[name].double() - x).abs()
            wrong = ~((off <= bound) | (ours[name] == x) | (ours[name].isnan() & x.isnan()))
            if but is not None:
                wrong &= ~but[..., None]
            at = tuple(wrong.nonzero()[:1].flatten().tolist())
            assert not at, (name, f"{int(wrong.sum())} wrong", at, ours[name][at].item(), x[at].item())

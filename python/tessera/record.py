"""python -m tessera.record: the production record of one workload: what runs, where, how right it is, how fast."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy

from . import _tessera, manifest
from .problem import BOTTOM_RIGHT
from .workload import CORNER_AT, Arrays, Workload, bits, quantile, torch

RUNS = 3
MOST_SEQUENCES = 8  # whose masks are counted
MOST_PAIRS = 1 << 24  # of (row, key) in a mask that is counted
RIGHT, WRONG, INVALID, UNSUPPORTED = range(4)
PASSES = ("forward", "backward", "append")
Facts = dict[str, Any]


def shape_of(w: Workload) -> Facts:
    p = w.problem
    facts: Facts = {
        "pass": PASSES[p.pass_],
        "batch": p.batch,
        "heads q / kv": f"{p.heads_q} / {p.heads_kv}",
        "lengths q / k": f"{p.len_q} / {p.len_k}",
        "head dims qk / v": f"{p.dim} / {p.dim_v}",
    }
    if p.rows_q or p.rows_k:
        facts["packed rows q / k"] = f"{p.rows_q} / {p.rows_k}"
    if "k_new" in w.operands:
        facts["new tokens"] = p.len_new
    if w.is_cache:
        pages = f", pages of {p.page_size}, {p.pages} of them" if p.page_size else ""
        facts["cache"] = f"{w.slots} slots a sequence{pages}" + ", ring" * p.ring + ", v lies in k" * p.v_in_k
    if p.rotary_dim:
        facts["rotary"] = f"{p.rotary_dim} numbers, {'interleaved' if p.rotary_interleaved else 'halves'}"
    return facts


def numerics_of(w: Workload, verdicts: list[Facts]) -> Facts:
    p, o = w.problem, w.operands
    facts = {
        "dtypes": ", ".join(f"{n} {o[n].dtype}" for n in ("q", "k", "v", "bias", "out") if n in o),
        "accumulation": "float64" if o["k"].dtype == "f64" else "float32" + (", TF32 allowed" if p.allow_tf32 else ""),
        "scale": p.scale if p.has_scale else 1 / math.sqrt(max(1, p.dim)),
        "scale is": "the caller's" if p.has_scale else "1/sqrt(head dim)",
        "softcap": p.softcap or None,
        "dropout": p.dropout and f"{p.dropout}, seed {p.seed}, offset {p.offset}" or None,
        "extras": ", ".join(n for n in ("bias", "slopes", "sinks", "dlse") if n in o) or None,
        "judged": f"{w.sample_pairs} (batch, KV head) pair" if w.sample_pairs else "everything",
    }
    return facts | {"verdicts": verdicts}


def mask_words(w: Workload) -> list[str]:
    """The parts of the mask, a sentence each; p is the place of a query row on the key axis, j that of a key."""
    p, words = w.problem, []
    if p.has_prefix:
        words.append(f"prefix: j < {p.prefix} or j <= p")
    elif p.causal:
        words.append("causal: j <= p")
    if p.has_window:
        left = "" if p.window_left_unbounded else f"p - {p.window_left} <= "
        right = "" if p.window_right_unbounded else f" <= p + {p.window_right}"
        words.append(f"window: {left}j{right}" + (f", or j < {p.first}" if p.first else ""))
    if p.chunk:
        words.append(f"chunk: j and p in the same {p.chunk} keys")
    for name, text in (
        ("keep", "keep: where a bool tensor is true (here 70 % of it, at random)"),
        ("exclude_keys", "exclude_keys: not where a bool tensor is true (here 20 % of it, at random)"),
        ("documents_q", "documents: query and key of the same document (here four a sequence)"),
    ):
        if name in w.operands:
            words.append(text)
    if p.corner:
        at = "a list's" if "corner_offsets" in w.operands else f"{p.corner_at}"
        where = {BOTTOM_RIGHT: "keys - queries (bottom right)", CORNER_AT: at}.get(p.corner, "0 (top left)")
        words.append(f"row i stands at p = i + {where}")
    return words or ["every key that the sequence has"]


def mask_of(w: Workload) -> Facts:
    """The mask in words, and how many keys the rows of each sequence see."""
    p, sequences = w.problem, []
    if p.pass_ < len(PASSES) - 1 and p.len_q * p.len_k * (p.heads_q if "keep" in w.operands else 1) <= MOST_PAIRS:
        for b in range(min(p.batch, MOST_SEQUENCES)):
            counts = w.kept(b).sum(-1)
            row: Facts = {"sequence": b, "queries": w.rows("q", b).used, "keys": w.rows("k", b).used}
            if counts.size:
                row |= {"kept min": int(counts.min()), "median": float(numpy.median(counts)), "max": int(counts.max())}
                row["rows that see nothing"] = int((counts == 0).sum())
            sequences.append(row)
    return {"words": mask_words(w), "kept keys a row": sequences, "sequences counted": f"{len(sequences)} of {p.batch}"}


def dispatch_of(plan: _tessera.Plan) -> Facts:
    return {
        "engine": plan.engine,
        "kernel": plan.kernel,
        "library": _tessera.__file__,
        "threads": plan.threads,
        "tile": f"{plan.tile_rows} rows x {plan.tile_keys} keys",
        "steps": plan.steps(),
        "not chosen": [{"kernel": kernel, "reason": why} for kernel, why in plan.reasons()],
        "plan": str(plan),
    }


# ------------------------------------------------------------------------------------------------------------ evidence


def answer(w: Workload, plan: _tessera.Plan, arrays: Arrays | None = None) -> tuple[bytes, ...]:
    """The bits of the results; of an append those of the cache."""
    mine = w.fresh() if arrays is None else arrays
    w.run(plan, mine)
    return tuple(bits(mine[n]) for n in w.results or ("k", "v"))


def poisoned(w: Workload) -> Arrays | None:
    """The inputs with NaN in each row of q, k and v that nobody reads; None if there is none."""
    mine, found = w.fresh(), False
    for name in ("q", "k", "v"):
        if name not in w.operands or 0 in w.operands[name].strides or (name == "v" and w.problem.v_in_k):
            continue
        unused = w.unused(name)
        if not unused.any():
            continue
        found = True
        old, mine[name] = mine[name], w.empty(name)
        clean = ~unused
        source, target = (old, mine[name]) if torch is None else (raw(old), raw(mine[name]))
        target[clean] = source[clean]
        if w.problem.v_in_k and name == "k":
            mine["v"] = w.empty("v", mine)
    return mine if found else None


def raw(tensor: Any) -> Any:
    """float8 as bytes: torch does not index it."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def time_of(w: Workload, plan: _tessera.Plan, seconds: float) -> list[float]:
    """Seconds of each run, for about so many in all and at least three."""
    mine = w.fresh()
    times: list[float] = []
    w.run(plan, mine)
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        w.run(plan, mine)
        times.append(time.perf_counter() - begin)
    return times


def evidence_of(w: Workload, plan: _tessera.Plan, threads: int, seconds: float) -> Facts:
    first = answer(w, plan)
    many = max(2, threads or _tessera.device("host")[2])
    alone, together = (_tessera.Plan(w.problem, "host", plan.kernel, n) for n in (1, many))
    unused = poisoned(w) if w.results else None
    times = time_of(w, plan, seconds)
    median = quantile(times, 0.5)
    return {
        f"same bits in {RUNS} runs": all(answer(w, plan) == first for _ in range(RUNS - 1)),
        f"same bits with 1 and {many} threads": answer(w, alone) == answer(w, together),
        "NaN in unused rows changes no bit": None if unused is None else answer(w, plan, unused) == first,
        "median us": median * 1e6,
        "p95 us": quantile(times, 0.95) * 1e6,
        "runs timed": len(times),
        "GFLOP/s": plan.flops / median * 1e-9,
        "GB/s": (plan.bytes_read + plan.bytes_written) / median * 1e-9,
        "workspace bytes": plan.workspace_bytes,
        "score bytes avoided": plan.score_bytes_avoided,
    }


def commit() -> str | None:
    """Of the checkout that the package lies in, if it is one of Tessera's."""
    here = str(Path(__file__).parent)

    def git(*words: str) -> str:
        return subprocess.run(("git", "-C", here, *words), capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def record(line: str, threads: int = 0, seconds: float = 1.0) -> Facts:
    """Everything about one workload, as JSON can hold it. `ok`: verdicts and same bits."""
    w = Workload(line, threads=threads)
    plan = _tessera.Plan(w.problem, "host", None, threads)
    mine = w.fresh()
    w.run(plan, mine)
    verdicts = w.judge(mine)
    evidence = evidence_of(w, plan, threads, seconds)
    return {
        "line": w.line,
        "ok": all(v["ok"] for v in verdicts) and not any(value is False for value in evidence.values()),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "shape": shape_of(w),
        "numerics": numerics_of(w, verdicts),
        "mask": mask_of(w),
        "dispatch": dispatch_of(plan),
        "evidence": evidence,
        "manifest": manifest() | {"commit": commit()},
    }


# ---------------------------------------------------------------------------------------------------------- markdown


def cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "**NO**"
    if isinstance(value, float):
        return f"{value:,.1f}" if value >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "; ".join(map(cell, value)) if isinstance(value, list) else str(value).replace("|", "\\|")


def grid_text(rows: list[Facts]) -> list[str]:
    names = list(dict.fromkeys(n for row in rows for n in row))
    lines = [names, ["---"] * len(names), *([cell(row.get(n)) for n in names] for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def pairs(facts: Facts) -> list[str]:
    return grid_text([{"fact": name, "value": value} for name, value in facts.items() if not isinstance(value, dict)])


def markdown(r: Facts) -> str:
    """The record for a person: a table a section."""
    manifest, numerics, mask, dispatch = dict(r["manifest"]), dict(r["numerics"]), r["mask"], dict(r["dispatch"])
    build, verdicts, plan = manifest.pop("build"), numerics.pop("verdicts"), dispatch.pop("plan")
    lines = [f"# `{r['line']}`", "", f"{'Right' if r['ok'] else '**WRONG**'}. Recorded {r['date']}.", ""]
    lines += ["## Shape", "", *pairs(r["shape"]), "", "## Numerics", "", *pairs(numerics), ""]
    lines += ["Verdicts against the float64 oracle (docs/contract.md, section 9):", "", *grid_text(verdicts), ""]
    lines += ["## Mask", "", *(f"- {words}" for words in mask["words"]), ""]
    if mask["kept keys a row"]:
        lines += [f"Keys that a row sees ({mask['sequences counted']} sequences):", ""]
        lines += [*grid_text(mask["kept keys a row"]), ""]
    reasons = dispatch.pop("not chosen")
    lines += ["## Dispatch", "", *pairs(dispatch), "", *grid_text(reasons), "", "```", plan.rstrip(), "```", ""]
    lines += ["## Evidence", "", *pairs(r["evidence"]), "", "## Made with", "", *pairs(manifest | build), ""]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tessera.record", description=__doc__)
    parser.add_argument("line", metavar="LINE", help="a problem line (ADDING.md)")
    parser.add_argument("--out", metavar="FILE", help="JSON if it ends in .json, else Markdown; default: stdout")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as the work is worth")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing; at least three runs")
    o = parser.parse_args(arguments)
    try:
        made = record(o.line, o.threads, o.seconds)
        text = json.dumps(made, indent=2) + "\n" if o.out and o.out.endswith(".json") else markdown(made)
        if o.out:
            Path(o.out).write_text(text)
        else:
            print(text)
    except (ValueError, OSError, MemoryError, RuntimeError) as why:
        print(f"error: {why}", file=sys.stderr)
        return UNSUPPORTED if isinstance(why, NotImplementedError) else INVALID
    return RIGHT if made["ok"] else WRONG


if __name__ == "__main__":
    sys.exit(main())

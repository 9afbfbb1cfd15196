"""python -m tessera.bench: your own shapes, beside what you would otherwise use; a wrong result has no speed.

All contenders get the same inputs, on which each is judged first, by the rule of docs/contract.md, section 9. What a
peer is spared: masks and biases in its form are made before the clock starts, and lse is asked of tessera only. Of a
backward line tessera's backward alone is timed (out and lse are given), and of peers torch.autograd.grad alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from typing import Any

from . import manifest
from .peers import CONTENDERS, Call, Settings
from .workload import Arrays, Workload, bits, quantile, read_lines, torch

PEAK = "growth of the resident set's high-water mark in one run (/proc/self), given results added; about 0.5 MB exact"
QUICK = 0.01  # seconds; what is quicker runs once untimed in each turn: the threads of the one before still spin
TURN = 0.005  # seconds that a quick contender's turn lasts
EXIT = {"right": 0, "wrong": 1, "invalid": 2, "unsupported": 3}


# ----------------------------------------------------------------------------------------------------- judge and time


REFUSALS = (ValueError, MemoryError, RuntimeError)  # NotImplementedError is a RuntimeError


def refusal(why: Exception) -> str:
    return "unsupported" if isinstance(why, NotImplementedError) else "invalid"


class Entry:
    """A contender in one line's race, and its row of the result."""

    def __init__(self, name: str, w: Workload, settings: Settings, ours: dict[str, bytes]):
        self.name = name
        self.call: Call | None = None
        self.times: list[float] = []  # seconds
        self.row: dict[str, Any] = {"line": w.line, "contender": name, "result": "right", "message": None, "how": None}
        try:
            call = CONTENDERS[name](w, settings)
            self.row["how"] = call.how
            made = call.run()
            self.judge(w, call, call.results(made), ours)
            if self.row["result"] == "right":
                self.row["peak_bytes"] = peak_of(call)
                self.call = call
        except Exception as why:  # whatever a peer raises, others still race
            if name == "tessera" and not isinstance(why, REFUSALS):
                raise
            self.fail(refusal(why) if name == "tessera" else "cannot", why)

    def fail(self, result: str, why: Exception | str) -> None:
        self.row |= {"result": result, "message": str(why).strip() or type(why).__name__}

    def judge(self, w: Workload, call: Call, arrays: Arrays, ours: dict[str, bytes]) -> None:
        verdicts = [v for v in w.judge(arrays) if v["name"] in call.names]
        self.row["verdicts"] = verdicts
        self.row["pairs_judged"] = w.sample_pairs or "all"
        if wrong := [v for v in verdicts if not v["ok"]]:
            self.fail("wrong", "; ".join(map(figure, wrong)))
        mine = {n: bits(arrays[n]) for n in call.names}
        self.row["same_bits"] = self.name == "tessera" or (
            bool(ours) and all(ours.get(n) == b for n, b in mine.items())
        )
        if self.name == "tessera":
            ours.update(mine)

    def turn(self) -> None:
        run, begin = self.call.run, time.perf_counter()  # type: ignore[union-attr]
        if self.times and self.times[-1] > QUICK:
            run()
            self.times.append(time.perf_counter() - begin)
            return
        run()
        first = begin = time.perf_counter()
        while begin - first < TURN:
            run()
            end = time.perf_counter()
            self.times.append(end - begin)
            begin = end


def figure(v: dict[str, Any]) -> str:
    if not v["nonfinite_equal"]:
        return f"{v['name']}: inf or nan where the oracle has none, or none where it has"
    return f"{v['name']}: error {v['max']:.3g}, bound {v['bound']:.3g} (rms {v['rms']:.3g}, bound {v['bound_rms']:.3g})"


def peak_of(call: Call) -> int | None:
    """See PEAK; None where the system does not tell."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = memory("VmRSS")
        kept = call.run()
        grown = memory("VmHWM") - before
        del kept
    except (OSError, AttributeError):
        return None
    return max(0, grown) + call.given_bytes


def memory(fact: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(fact))


def measure(line: str, names: list[str], settings: Settings, seconds: float) -> list[dict[str, Any]]:
    """One row a contender, tessera's first. ValueError if the line is none."""
    w = Workload(line, threads=settings.threads)
    ours: dict[str, bytes] = {}
    entries = [Entry(name, w, settings, ours) for name in ["tessera", *(n for n in names if n != "tessera")]]
    able = [e for e in entries if e.call]
    begin, rounds = time.perf_counter(), 0
    while able and (rounds < 3 or time.perf_counter() - begin < seconds * len(able)):
        for entry in able:  # in turn, so that a machine that slows down slows all
            entry.turn()
        rounds += 1
    for e in able:
        e.row |= {
            "median_us": quantile(e.times, 0.5) * 1e6,
            "p95_us": quantile(e.times, 0.95) * 1e6,
            "runs": len(e.times),
        }
    base = entries[0].row.get("median_us")
    for e in able:
        e.row["ratio"] = e.row["median_us"] / base if base else None
    return [e.row for e in entries]


# --------------------------------------------------------------------------------------------------------------- show


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        rows[0]["line"],
        f"  {'contender':<11}{'result':<19}{'median us':>12}{'p95 us':>12}{'times ours':>12}{'peak MB':>10}  how",
    ]
    for r in rows:
        head = f"  {r['contender']:<11}"
        if "median_us" not in r:
            lines.append(f"{head}{r['result']:<19}{' '.join(r['message'].split())}")
            continue
        result = (
            "right" if r["contender"] == "tessera" else "right, same bits" if r["same_bits"] else "right, other bits"
        )
        ratio = "-" if r["ratio"] is None else f"{r['ratio']:.2f}"
        peak = "-" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 1e6:.1f}"
        times = f"{r['median_us']:>12,.1f}{r['p95_us']:>12,.1f}"
        lines.append(f"{head}{result:<19}{times}{ratio:>12}{peak:>10}  {r['how']}")
    return "\n".join(lines) + "\n"


def plot(results: list[list[dict[str, Any]]], device: str, path: str) -> None:
    """A bar a contender, a group a line; the whisker ends at p95. Who has no time has a word instead."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        raise ValueError(
            f"--plot {path}: matplotlib is not installed. pip install matplotlib, or leave --plot out."
        ) from None
    names = [r["contender"] for r in results[0]]
    figure, axes = pyplot.subplots(figsize=(11, 1.2 + 0.32 * sum(len(rows) + 1 for rows in results)))
    least = min((r["median_us"] for rows in results for r in rows if "median_us" in r), default=1.0)
    for group, rows in enumerate(results):
        axes.text(least / 2, group * (len(names) + 1.5) - 0.7, rows[0]["line"], fontsize=8, va="center", weight="bold")
        for n, r in enumerate(rows):
            y = group * (len(names) + 1.5) + n
            time_us, color = r.get("median_us"), f"C{n}"
            if time_us:
                axes.barh(y, time_us, color=color, xerr=[[0], [max(0, r["p95_us"] - time_us)]], ecolor="0.4")
            words = f"{time_us:,.0f} us" if time_us else f"{r['result']}: {r['message']}"[:90]
            axes.text((r.get("p95_us") or least / 2) * 1.05, y, f" {r['contender']}  {words}", fontsize=8, va="center")
    axes.set(xscale="log", xlabel=f"median time in microseconds, whisker to p95; {device}", yticks=[])
    axes.set_xlim(least / 2, max([r["p95_us"] for rows in results for r in rows if "p95_us" in r], default=2.0) * 8)
    axes.invert_yaxis()
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tessera.bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("lines", nargs="+", metavar="LINE", help="problem lines (ADDING.md), or files of them")
    parser.add_argument("--against", default="sdpa,naive", metavar="NAMES", help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--threads", type=int, default=0, help="of all contenders; 0: as each likes")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line and contender; at least three rounds")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE.png")
    parser.add_argument("--kernels", metavar="NAMES", help="tessera's kernels that may be chosen")
    return parser.parse_args(arguments)


def perform(o: argparse.Namespace) -> int:
    names = [n for n in o.against.split(",") if n]
    if unknown := [n for n in names if n not in CONTENDERS]:
        raise ValueError(f"--against: {unknown[0]} is no contender; they are {', '.join(CONTENDERS)}.")
    if not 0 <= o.threads <= 1024:
        raise ValueError(f"--threads is {o.threads}; it must be from 0 to 1024.")
    if not 0 <= o.seconds < 1e6:
        raise ValueError(f"--seconds is {o.seconds}; it must be at least 0.")
    if torch is not None and o.threads > 0:
        torch.set_num_threads(o.threads)
    results, worst = [], 0
    for line in read_lines(o.lines):
        try:
            rows = measure(line, names, Settings(o.threads, o.kernels), o.seconds)
        except REFUSALS as why:
            rows = [{"line": line, "contender": "tessera", "result": refusal(why), "message": str(why), "how": None}]
        results.append(rows)
        worst = min(
            filter(None, (worst, EXIT[rows[0]["result"]])), default=0
        )  # wrong before invalid before unsupported
        print(table(rows), flush=True)
    facts = manifest()
    print(f"{facts['device']}, tessera {facts['tessera']}, torch {facts['torch']}. Peak: {PEAK}.")
    if o.json:
        said = {"manifest": facts, "threads": o.threads, "seconds": o.seconds, "peak": PEAK}
        with open(o.json, "w") as file:
            json.dump(said | {"rows": [r for rows in results for r in rows]}, file, indent=2)
    if o.plot:
        plot(results, facts["device"], o.plot)
    return worst


def main(arguments: list[str] | None = None) -> int:
    o = parse(arguments)
    try:
        return perform(o)
    except (ValueError, OSError) as why:
        print(f"error: {why}", file=sys.stderr)
        return EXIT["invalid"]


if __name__ == "__main__":
    sys.exit(main())

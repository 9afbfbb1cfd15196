"""python -m tessera.bench and python -m tessera.record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tessera import bench, peers, record  # noqa: E402
from tessera.workload import Workload  # noqa: E402

LINES = [
    "forward f32 b1 h4 q96 k96 d64 mask=causal",
    "forward bf16 b2 h8/2 q64 k70 d64 mask=causal",
    "forward f32 h4/2 d32 varlen=q[1,40,0,20]k[30,40,5,25] mask=causal",
    "forward f32 b2 h2 q50 k60 d32 mask=window(7,2) max",
    "forward f32 b2 h2 q40 k50 d16 mask=keep(b,1,q,k)&exclude_keys&documents alibi",
    "backward f32 b2 h4/2 q33 k40 d32 mask=causal bias=1,h,q,k sink dlse",
    "decode f32 b3 h4/2 q2 k64 d32 page=16 append rotary=32 mask=causal",
    "decode f16 b2 h8/2 q1 k96 d64 page=16 kv=e4m3:head",
]
GROUPS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)  # torch's sdpa knows groups of heads
SDPA_ANSWERS = [True, GROUPS, GROUPS, True, True, False, False, False]


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)  # other tests keep theirs


def run_bench(folder: Path, *arguments: str) -> tuple[int, dict]:
    file = folder / "bench.json"
    code = bench.main([*arguments, "--seconds", "0.05", "--threads", "1", "--json", str(file)])
    return code, json.loads(file.read_text())


@pytest.mark.parametrize(("line", "sdpa_answers"), list(zip(LINES, SDPA_ANSWERS, strict=True)))
def test_bench(line: str, sdpa_answers: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run_bench(tmp_path, line, "--against", "sdpa,flash_attn,naive")
    assert code == 0
    assert said["manifest"]["torch"] and said["peak"]
    ours, sdpa, flash, naive = said["rows"]
    assert [r["contender"] for r in said["rows"]] == ["tessera", "sdpa", "flash_attn", "naive"]
    assert ours["result"] == naive["result"] == "right"
    assert sdpa["result"] == ("right" if sdpa_answers else "cannot")
    for row in said["rows"]:
        if row["result"] == "right":
            assert 0 < row["median_us"] <= row["p95_us"] < 60e6
            assert row["runs"] >= 3 and row["ratio"] > 0
            assert all(v["ok"] for v in row["verdicts"])
            assert row["peak_bytes"] is None or 0 <= row["peak_bytes"] < 1e9
        else:
            assert row["message"] and "median_us" not in row
    assert ours["ratio"] == 1 and ours["how"].startswith("cpu.")
    table = capsys.readouterr().out
    assert table.startswith(line) and "naive" in table


def test_causal_corner(tmp_path: Path) -> None:
    """SDPA's is_causal is asked only where its corner means the same."""
    same, other, top_left = LINES[0], "forward f32 h2 q9 k20 d16 mask=causal", "forward f32 h2 q9 k20 d16 mask=causal@top_left"
    _, said = run_bench(tmp_path, same, other, top_left, "--against", "sdpa")
    assert [r["how"] for r in said["rows"] if r["contender"] == "sdpa"] == ["is_causal", "bool mask", "is_causal"]


def test_wrong_contender_has_no_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def off_by_a_little(w: Workload, s: peers.Settings) -> peers.Call:
        right = peers.naive(w, s)

        def results(made: list) -> dict:
            arrays = right.results(made)
            arrays["out"][0, 0, 0, 0] += 0.01
            return arrays

        return right._replace(run=lambda: calls.append(1) or right.run(), results=results)

    def raises(w: Workload, s: peers.Settings) -> peers.Call:
        raise KeyError("no such kernel")

    monkeypatch.setitem(peers.CONTENDERS, "shaky", off_by_a_little)
    monkeypatch.setitem(peers.CONTENDERS, "broken", raises)
    code, said = run_bench(tmp_path, LINES[0], "--against", "shaky,broken,naive")
    _, shaky, broken, naive = said["rows"]
    assert code == 0  # tessera is right
    assert shaky["result"] == "wrong" and "error 0.01" in shaky["message"] and "bound" in shaky["message"]
    assert "median_us" not in shaky and len(calls) == 1
    assert broken["result"] == "cannot" and "no such kernel" in broken["message"]
    assert naive["result"] == "right"
    assert "wrong" in capsys.readouterr().out


def test_tessera_wrong_is_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(w: Workload, s: peers.Settings) -> peers.Call:
        right = peers.tessera_contender(w, s)
        return right._replace(results=lambda made: right.results(made) | {"out": torch.zeros_like(w.arrays["out"])})

    monkeypatch.setitem(peers.CONTENDERS, "tessera", zeros)
    code, said = run_bench(tmp_path, LINES[0], "--against", "naive")
    assert code == 1
    assert said["rows"][0]["result"] == "wrong"
    assert said["rows"][1]["ratio"] is None


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run_bench(tmp_path, "forward f32 h3/2 q4 k4 d8", LINES[0])
    assert code == 2 and said["rows"][0]["result"] == "invalid" and "heads" in said["rows"][0]["message"]
    assert said["rows"][1]["result"] == "right"  # the next line is measured all the same
    code, said = run_bench(tmp_path, LINES[0], "--kernels", "cpu.avx512bf16")
    assert code == 3 and said["rows"][0]["result"] == "unsupported"
    assert bench.main([LINES[0], "--against", "nobody"]) == 2
    assert "nobody is no contender" in capsys.readouterr().err
    assert record.main(["forward f32 h3/2 q4 k4 d8"]) == 2
    assert "heads" in capsys.readouterr().err


def test_files_and_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = tmp_path / "lines.txt"
    lines.write_text(f"# two lines\n{LINES[0]}\n\n{LINES[5]}  # the second\n")
    picture = tmp_path / "plot.png"
    code, said = run_bench(tmp_path, str(lines), "--plot", str(picture))
    assert code == 0 and [r["line"] for r in said["rows"]] == [LINES[0]] * 3 + [LINES[5]] * 3
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("line", LINES)
def test_record(line: str, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    assert record.main([line, "--out", str(file), "--seconds", "0.05", "--threads", "1"]) == 0
    made = json.loads(file.read_text())
    assert made["ok"] and made["line"] == line
    assert all(v["ok"] and v["max"] <= v["bound"] for v in made["numerics"]["verdicts"])
    evidence = made["evidence"]
    assert evidence["same bits in 3 runs"] and 0 < evidence["median us"] <= evidence["p95 us"]
    assert evidence["GFLOP/s"] > 0 and evidence["workspace bytes"] >= 0
    assert made["dispatch"]["kernel"].startswith("cpu.") and made["dispatch"]["not chosen"]
    assert made["mask"]["words"] and made["manifest"]["build"]


def test_record_counts_keys() -> None:
    mask = record.mask_of(Workload("forward f32 q4 k6 d8 mask=causal"))
    row = mask["kept keys a row"][0]
    assert (row["kept min"], row["median"], row["max"]) == (3, 4.5, 6)
    text = record.markdown(record.record("forward f32 h2 d8 varlen=q[3,5]k[4,9] rows=q20k40", seconds=0))
    assert text.startswith("# `forward f32 h2 d8 varlen=q[3,5]k[4,9] rows=q20k40`\n\nRight.")
    assert "| NaN in unused rows changes no bit | yes |" in text

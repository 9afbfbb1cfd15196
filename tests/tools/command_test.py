#!/usr/bin/env python3
"""The command as a person meets it: worked examples, exit codes, JSON, real and hostile files.

usage: command_test.py TESSERA SOURCE_DIR [sanitizer]
"""
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import time
import unittest

TESSERA, SOURCE, SANITIZER = sys.argv[1], pathlib.Path(sys.argv[2]), "".join(sys.argv[3:])
MINILM = SOURCE / "examples/minilm/minilm.safetensors"
LINE = "forward f32 b4 h12 q30 k30 d32 mask=exclude_keys"
RIGHT, WRONG, INVALID, UNSUPPORTED = range(4)


def tessera(*arguments, stdin=None):
    return subprocess.run([TESSERA, *map(str, arguments)], capture_output=True, text=True, input=stdin, timeout=300)


def write_tensors(path, tensors, header=None):
    """tensors: {name: (dtype, shape, bytes)}; header: bytes in place of the true one."""
    entries, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = header if header is not None else json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_header(path):
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length])


def floats(*values):
    return struct.pack(f"<{len(values)}f", *values)


class Base(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def expect(self, code, *arguments, says=(), stdin=None):
        ran = tessera(*arguments, stdin=stdin)
        self.assertEqual(ran.returncode, code, f"{arguments}\n{ran.stdout}\n{ran.stderr}")
        for word in [says] if isinstance(says, str) else says:
            self.assertIn(word, ran.stdout + ran.stderr, arguments)
        return ran


class Mask(Base):
    def grid(self, line, *more):
        return self.expect(RIGHT, "mask", line, *more).stdout.split()

    def test_worked_examples(self):
        self.assertEqual(self.grid("forward f32 q2 k5 mask=causal"), ["11110", "11111"])
        self.assertEqual(self.grid("forward f32 q2 k5 mask=causal@top_left"), ["10000", "11000"])
        self.assertEqual(self.grid("forward f32 q5 k2 mask=causal"), ["00", "00", "00", "10", "11"])

    def test_counts_and_picture(self):
        self.assertEqual(self.grid("forward f32 q3 k3 mask=window(1,0)", "--counts"), ["1", "2", "2"])
        picture = self.folder / "mask.png"
        self.expect(RIGHT, "mask", "forward f32 q64 k64 mask=causal", "--png", picture)
        self.assertTrue(picture.read_bytes().startswith(b"\x89PNG"))

    def test_padding_of_a_file(self):
        counts = self.grid(LINE, "--in", MINILM, "--batch", "0", "--counts")
        self.assertEqual(counts, ["8"] * 30)

    def test_out_of_range(self):
        self.expect(INVALID, "mask", "forward f32 q2 k2 mask=causal", "--batch", "1", says="batch")


class Files(Base):
    def test_real_input_is_attended_and_verified(self):
        out = self.folder / "out.safetensors"
        self.expect(RIGHT, "run", LINE, "--in", MINILM, "--out", out, "--verify")
        self.assertEqual(read_header(out)["out"]["shape"], [4, 30, 12, 32])
        self.assertEqual(read_header(out)["lse"]["shape"], [4, 12, 30])
        self.expect(RIGHT, "verify", LINE, "--in", MINILM, "--got", out)
        self.expect(RIGHT, "verify", LINE, "--in", MINILM, "--got", MINILM)  # the original model's own out

    def test_a_wrong_result_is_found(self):
        out = self.folder / "out.safetensors"
        self.expect(RIGHT, "run", LINE.replace("exclude_keys", "none"), "--in", MINILM, "--out", out)
        self.expect(WRONG, "verify", LINE, "--in", MINILM, "--got", out)

    def test_backward_from_a_file(self):
        line, out, gradients = "b1 h1 q2 k2 d1 mask=causal", self.folder / "out.safetensors", self.folder / "g.safetensors"
        given = {name: ("F32", [1, 2, 1, 1], floats(1.0, -0.5)) for name in ("q", "k", "v", "dout")}
        write_tensors(self.folder / "in.safetensors", given)
        self.expect(INVALID, "run", "backward f32 " + line, "--in", self.folder / "in.safetensors", "--out", gradients, says="forward")
        self.expect(RIGHT, "run", "forward f32 " + line, "--in", self.folder / "in.safetensors", "--out", out)
        header, content = read_header(out), out.read_bytes()
        start = 8 + struct.unpack("<Q", content[:8])[0]
        for name in ("out", "lse"):
            begin, end = header[name]["data_offsets"]
            given[name] = (header[name]["dtype"], header[name]["shape"], content[start + begin : start + end])
        write_tensors(self.folder / "all.safetensors", given)
        self.expect(RIGHT, "run", "backward f32 " + line, "--in", self.folder / "all.safetensors", "--out", gradients, "--verify")
        self.assertEqual(read_header(gradients)["dq"]["shape"], [1, 2, 1, 1])

    def test_backward_from_two_files(self):
        line, given, out = "b1 h1 q2 k2 d1", self.folder / "in.safetensors", self.folder / "fwd.safetensors"
        gradients, tensor = self.folder / "g.safetensors", ("F32", [1, 2, 1, 1], floats(1.0, -0.5))
        write_tensors(given, {name: tensor for name in ("q", "k", "v", "dout")})
        self.expect(INVALID, "run", "backward f32 " + line, "--in", given, says=f"--in {given} --in fwd.safetensors")
        self.expect(RIGHT, "run", "forward f32 " + line, "--in", given, "--out", out)
        self.expect(RIGHT, "run", "--in", given, "--in", out, "backward f32 " + line, "--out", gradients, "--verify")
        self.expect(RIGHT, "verify", "backward f32 " + line, "--in", given, "--in", out, "--got", gradients)
        write_tensors(out, {"k": tensor})
        for verb in (["run"], ["verify", "--got", gradients]):
            self.expect(INVALID, *verb, "forward f32 " + line, "--in", given, "--in", out, says=["tensor k", str(given), str(out)])

    def test_inputs_are_not_overwritten(self):
        given, other = self.folder / "in.safetensors", self.folder / "link"
        write_tensors(given, {name: ("F32", [1, 1, 1, 1], floats(1.0)) for name in ("q", "k", "v")})
        other.symlink_to(given)
        before = given.read_bytes()
        for out in (given, other, f"{self.folder}/./in.safetensors"):
            self.expect(INVALID, "run", "forward f32 q1 k1 d1", "--in", given, "--out", out, says="another name")
            self.expect(INVALID, "mask", "forward f32 q1 k1 d1", "--in", given, "--png", out, says="another name")
        self.assertEqual(given.read_bytes(), before)

    def test_unused_inputs_are_noted(self):
        given, tensor = self.folder / "in.safetensors", ("F32", [1, 1, 1, 1], floats(1.0))
        write_tensors(given, {name: tensor for name in ("q", "k", "v", "bias", "out", "dout", "dq", "mine")})
        ran = self.expect(RIGHT, "run", "forward f32 q1 k1 d1", "--in", given)
        self.assertEqual(ran.stderr, f"tessera: note: bias is in the file {given}, but the line does not use it\n")
        self.assertEqual(self.expect(RIGHT, "run", "forward f32 q1 k1 d1 bias=1,1,1,1", "--in", given).stderr, "")

    def test_a_sample_cannot_judge_sums(self):
        line, path = "backward f32 b2 h1 q1 k1 d1 sink", self.folder / "all.safetensors"
        given = {name: ("F32", [2, 1, 1, 1], floats(0.0, 0.0)) for name in ("q", "k", "v", "out", "dout")}
        given |= {"lse": ("F32", [2, 1, 1], floats(0.6931472, 0.6931472)), "sinks": ("F32", [1], floats(0.0)),
                  "dsinks": ("F32", [1], floats(0.0))}
        write_tensors(path, given)
        self.expect(RIGHT, "verify", line, "--in", path, "--got", path)
        self.expect(INVALID, "verify", line, "--in", path, "--got", path, "--sample", "1", says="sample")

    def test_outputs_that_cannot_be_written(self):
        self.expect(INVALID, "run", LINE, "--in", MINILM, "--out", self.folder / "no/such/folder/out", says="no/such/folder")
        self.expect(INVALID, "run", LINE, "--in", MINILM, "--out", self.folder, says=str(self.folder))
        self.assertEqual(list(self.folder.iterdir()), [])

    @unittest.skipIf(SANITIZER == "thread", "ThreadSanitizer itself writes files and dies of the limit")
    def test_a_full_disk_leaves_nothing(self):
        # RLIMIT_FSIZE ends writing as a full disk does.
        out = self.folder / "out.safetensors"
        script = 'ulimit -f 64; trap "" XFSZ; exec "$@"'
        ran = subprocess.run(["bash", "-c", script, "-", TESSERA, "run", LINE, "--in", str(MINILM), "--out", str(out)],
                             capture_output=True, text=True)
        self.assertEqual(ran.returncode, INVALID, ran.stderr)
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_wrong_tensors(self):
        good = {name: ("F32", [1, 2, 1, 1], floats(1, 2)) for name in ("q", "k", "v")}
        line, path = "forward f32 b1 h1 q2 k2 d1", self.folder / "in.safetensors"
        for change, words in [
            ({"q": ("F16", [1, 2, 1, 1], b"\0" * 4)}, ["q", "F16"]),
            ({"k": ("F32", [2, 1, 1, 1], floats(1, 2))}, ["k", "[2, 1, 1, 1]"]),
            ({"v": None}, ["v"]),
        ]:
            tensors = {n: t for n, t in {**good, **change}.items() if t is not None}
            write_tensors(path, tensors)
            self.expect(INVALID, "run", line, "--in", path, "--out", self.folder / "out", says=words)
        write_tensors(path, {**good, "exclude_keys": ("U8", [1, 2], b"\0\1")})
        self.expect(INVALID, "run", line + " mask=exclude_keys", "--in", path, "--out", self.folder / "out", says=["exclude_keys", "U8"])

    def test_headers_that_lie(self):
        path, data = self.folder / "in.safetensors", b"\0" * 64
        entry = lambda **more: {"dtype": "F32", "shape": [1, 2, 1, 1], "data_offsets": [0, 8], **more}
        lies = [
            struct.pack("<Q", 1 << 60) + b"{}",                       # a header longer than the file
            struct.pack("<Q", 5) + b"{",                              # cut
            b"\x01\x02",                                              # no length
            struct.pack("<Q", 2) + b"[]" + data,                      # not an object
            struct.pack("<Q", 4) + b"\xff\xfe{}" + data,              # not UTF-8
        ]
        for header in [
            {"q": entry(data_offsets=[0, 1 << 62])},                  # past the end
            {"q": entry(data_offsets=[8, 0])},                        # backwards
            {"q": entry(data_offsets=[-8, 0])},
            {"q": entry(shape=[1, -2, 1, 1])},
            {"q": entry(shape=[1 << 40, 1 << 40, 1, 1])},             # overflows
            {"q": entry(shape=[1, 3, 1, 1])},                         # other bytes than its shape
            {"q": entry(dtype="F31")},
            {"q": entry(), "k": entry(data_offsets=[4, 12])},         # overlap
            {"q": entry(shape="two")},
            {"q": 3},
            {"q": {"dtype": "F32"}},
        ]:
            text = json.dumps(header).encode()
            lies.append(struct.pack("<Q", len(text)) + text + data)
        for content in lies:
            path.write_bytes(content)
            ran = self.expect(INVALID, "run", "forward f32 b1 h1 q2 k2 d1", "--in", path, "--out", self.folder / "out")
            self.assertIn(str(path), ran.stderr)
            self.assertFalse((self.folder / "out").exists())
        self.expect(INVALID, "run", "forward f32 q2 k2 d1", "--in", self.folder / "absent", "--out", self.folder / "out", says="absent")


class Lines(Base):
    def test_bad_lines(self):
        for line in ["", "sideways d64", "forward", "forward d", "forward d64 d32", "forward d64 mask=casual", "forward d0",
                     "forward h6/4 d64", "forward d99999999999999999999", "forward b-1 d64", "forward d64 dropout=1",
                     "forward d64 varlen=q[1,2", "forward d64 mask=window(1)", "forward d64 \x01", "forward d64 scale=nan"]:
            for verb in ("plan", "check"):
                ran = self.expect(INVALID, verb, line)
                self.assertTrue(ran.stderr or ran.stdout, line)

    def test_plan(self):
        ran = self.expect(RIGHT, "plan", "--json", "forward bf16 b4 h32/8 q4096 k4096 d128 mask=causal")
        plan = json.loads(ran.stdout)
        for key in ("engine", "kernel", "workspace_bytes", "bytes_read", "bytes_written", "score_bytes_avoided", "flops", "refused"):
            self.assertIn(key, plan)
        self.assertTrue(all(row["reason"] for row in plan["refused"]))
        self.expect(UNSUPPORTED, "plan", "forward f64 q8 k8 d64", "--device", "h200", says=["cpu.baseline", "GPU"])
        self.expect(RIGHT, "plan", "forward f32 q8 k8 d64", "--device", "h200", says="cuda.general")
        self.expect(UNSUPPORTED, "plan", "forward f32 q8 k8 d64", "--workspace", "16", says="workspace")
        self.expect(RIGHT, "plan", "forward f32 q8 k8 d64", "--device", "avx2", says="cpu.avx2")
        self.expect(INVALID, "plan", "forward f32 q8 k8 d64", "--device", "abacus", says=["abacus", "h200"])

    def test_check(self):
        ran = self.expect(RIGHT, "check", "--json", "forward f32 q65 k33 d16 mask=causal", "backward f64 q9 k17 d8 softcap=5")
        results = json.loads(ran.stdout)["results"]
        self.assertTrue(all(r["ok"] for r in results))
        self.assertEqual(set(results[1]["tensors"]), {"dq", "dk", "dv"})
        self.assertIn("bound", results[0]["tensors"]["out"])
        self.assertIn("2 passed, 0 failed", self.expect(RIGHT, "check", "forward q3 k3 d4", "forward q1 k0 d4").stdout.splitlines())

    def test_check_of_files_and_stdin(self):
        lines = self.folder / "lines.txt"
        lines.write_text("# a comment\n\nforward q3 k3 d4\nforward q3 k3 d4 mask=wrong\n")
        self.expect(INVALID, "check", lines, says="lines.txt:4")
        self.expect(RIGHT, "check", "-", stdin="forward q3 k3 d4\n", says="1 passed, 0 failed")
        self.expect(UNSUPPORTED, "check", "forward f32 q3 k3 d4", "--engine", "cpu.avx512bf16")

    def test_bench(self):
        ran = self.expect(RIGHT, "bench", "--json", "forward f32 h2 q128 k128 d32 mask=causal", "--engine", "cpu,materialised", "--seconds", "0.2")
        for row in json.loads(ran.stdout)["results"]:
            for key in ("line", "engine", "kernel", "median_us", "p95_us", "gflops", "gbs", "peak_bytes", "ok", "device", "driver", "versions", "commit"):
                self.assertIn(key, row)
            self.assertTrue(row["ok"])

    def test_bench_of_engines_that_cannot_run(self):
        begin = time.monotonic()
        self.expect(UNSUPPORTED, "bench", "forward f32 q3 k3 d4", "--engine", "cpu.avx512bf16,cpu.avx512bf16", "--seconds", "60")
        self.assertLess(time.monotonic() - begin, 30)

    @unittest.skipIf(SANITIZER, "sanitizers need more address space than the limit")
    def test_memory_that_the_machine_does_not_give(self):
        # The score matrix of the first line takes 3.6 GB.
        command = ["bench", "--json", "forward f32 q30000 k30000 d1", "forward f32 q3 k3 d4",
                   "--engine", "materialised", "--seconds", "0.01", "--threads", "1"]
        ran = subprocess.run(["bash", "-c", 'ulimit -v 2000000; exec "$@"', "-", TESSERA, *command], capture_output=True, text=True)
        self.assertEqual(ran.returncode, INVALID, ran.stderr)
        rows = json.loads(ran.stdout)["results"]
        self.assertEqual([row["ok"] for row in rows], [False, True])
        self.assertEqual(rows[0]["error"]["code"], "failed")

    def test_sums_over_all_pairs_are_judged_in_full(self):
        # Large by its bounds, small by its lengths: sampled, were it not for dsinks.
        line = "backward f32 b2 h2/1 q2000 k2000 d300 sink seqused=q[3,3]k[5,5]"
        tensors = json.loads(self.expect(RIGHT, "check", "--json", line).stdout)["tensors"]
        self.assertIn("dsinks", tensors)
        self.assertEqual(tensors["dq"]["elements"], 2 * 2000 * 2 * 300)

    def test_info_and_help(self):
        self.expect(RIGHT, "info", says=["threads", "gpu"])
        json.loads(self.expect(RIGHT, "info", "--json").stdout)
        for verb in ("run", "verify", "mask", "plan", "check", "bench", "info"):
            self.expect(RIGHT, verb, "--help", says="Example")
        self.expect(INVALID, "juggle", says="juggle is not a verb")
        self.expect(INVALID)

    def test_numbers(self):
        line = "forward f32 q3 k3 d4"
        for verb, option, value in [("run", "--threads", "-1"), ("run", "--workspace", "100KB"), ("bench", "--seconds", "0"),
                                    ("check", "--sample", "x"), ("check", "--seed", "-1"), ("mask", "--batch", "-1")]:
            ran = self.expect(INVALID, verb, line, option, value, says=[option, f"is {value}; it must be"])
            self.assertLess(len(ran.stderr), 120)
        self.expect(INVALID, "mask", line, "--head", "1", says="counted from 0")
        self.expect(UNSUPPORTED, "run", line, "--random", "--workspace", "16", says="the limit is 16")

    def test_the_line_is_shown_whole(self):
        line = "forward f32 b2 q3 k3 d4 dropout=0.5@seed7 seqused=q[1,2]"
        for arguments in (["plan", line], ["run", line, "--random"]):
            self.expect(RIGHT, *arguments, says=["seed7", "[1,2]"])

    def test_errors_as_json(self):
        error = json.loads(self.expect(INVALID, "plan", "--json", "forward d0").stdout)["error"]
        self.assertEqual(error["code"], "invalid")
        self.assertIn("dim is 0", error["message"])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    unittest.main(argv=sys.argv[:1], verbosity=1)

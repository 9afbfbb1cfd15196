#!/usr/bin/env python3
"""The command on machines without a GPU: with a driver that is none of NVIDIA's (fake_libcuda.cc), without a driver,
without a pack, without NVRTC. What is missing is said in one sentence.

usage: driver_test.py TESSERA LIBTESSERA FAKE_FOLDER [sanitizer]
"""
import ctypes
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

TESSERA, LIBRARY, FAKE = map(pathlib.Path, sys.argv[1:4])
SANITIZER = "".join(sys.argv[4:])
PACK = LIBRARY.parent / "tessera.pack"
LINE = "forward bf16 h2 q16 k16 d64"
PLAN, RUN, CHECK = ["plan", LINE, "--engine", "cuda"], ["run", LINE, "--random", "--engine", "cuda"], ["check", LINE]
RIGHT, WRONG, INVALID, UNSUPPORTED = range(4)


def opens(*names):
    """Is one of these libraries on this machine?"""
    for name in names:
        try:
            ctypes.CDLL(name)
            return True
        except OSError:
            pass
    return False


REAL_DRIVER = opens("libcuda.so.1")
OLD_NVRTC = opens("libnvrtc.so.12", "/usr/local/cuda/lib64/libnvrtc.so.12")
NVRTC = OLD_NVRTC or opens("libnvrtc.so.13", "/usr/local/cuda/lib64/libnvrtc.so.13")
needs_nvrtc = unittest.skipUnless(NVRTC and not SANITIZER, "no NVRTC, or a sanitizer, whose business it is not")


def chip(arch, shared_bytes=232448):
    return {"FAKE_CUDA_DEVICE": f"NVIDIA Chip:{arch}:132:{shared_bytes}"}


class Base(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.cache = self.folder / "cache"

    def expect(self, code, *arguments, says=(), fake=True, **variables):
        """A run of the command with the fake driver or without, and with these environment variables."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("FAKE_CUDA_")}
        environment["TESSERA_CACHE"] = self.cache
        environment |= variables
        if fake:
            path = [FAKE, environment.get("LD_LIBRARY_PATH")]
            environment["LD_LIBRARY_PATH"] = ":".join(str(folder) for folder in path if folder)
        environment = {key: str(value) for key, value in environment.items()}
        command = [TESSERA, *map(str, arguments)]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        self.assertEqual(ran.returncode, code, f"{arguments}\n{ran.stdout}\n{ran.stderr}")
        for word in [says] if isinstance(says, str) else says:
            self.assertIn(word, ran.stdout + ran.stderr, arguments)
        return ran

    def engine(self, **options):
        """What `tessera info` says of the GPU engine."""
        return json.loads(self.expect(RIGHT, "info", "--json", **options).stdout)["gpu_engine"]

    def kernels(self, **options):
        return json.loads(self.expect(RIGHT, "kernels", "--json", fake=False, **options).stdout)["kernels"]


class NoDriver(Base):
    def expect_none(self, sentence, **options):
        """The same sentence wherever the engine is asked for; the processor answers as ever."""
        said = self.engine(**options)
        self.assertTrue(said.startswith("none: "), said)
        self.assertIn(sentence, said)
        self.assertNotIn("\n", said)
        for arguments in ([*CHECK, "--engine", "cuda"], [*CHECK, "--device", "cuda"], RUN):
            self.expect(INVALID, *arguments, says=sentence, **options)
        error = json.loads(self.expect(INVALID, *PLAN, "--json", **options).stdout)["error"]
        self.assertEqual(error["code"], "failed")
        self.assertIn(sentence, error["message"])
        self.assertIn('Run on "host", or plan', error["message"])
        self.expect(RIGHT, *PLAN, "--device", "h200", says="1 attend   cuda.sm90", **options)
        self.expect(RIGHT, *CHECK, says="1 passed, 0 failed", **options)

    @unittest.skipIf(REAL_DRIVER, "this machine has a driver")
    def test_none(self):
        self.expect_none("no NVIDIA driver: libcuda.so.1 cannot be opened", fake=False)

    def test_a_file_that_is_no_library(self):
        (self.folder / "libcuda.so.1").write_bytes(b"")
        sentence = "no NVIDIA driver: libcuda.so.1 cannot be opened"
        self.expect_none(sentence, fake=False, LD_LIBRARY_PATH=self.folder)

    def test_too_old(self):
        self.expect_none("the NVIDIA driver is CUDA 11.8; Tessera needs 12.0 or newer", FAKE_CUDA_VERSION=11080)
        self.assertTrue(self.engine(FAKE_CUDA_VERSION=12000).startswith("ready: "))

    def test_that_does_not_start(self):
        said = "the NVIDIA driver does not start: cuInit says"
        self.expect_none(f"{said} 100 (no CUDA-capable device is detected)", FAKE_CUDA_INIT=100)
        self.expect_none(f"{said} 999 (no words for it)", FAKE_CUDA_INIT=999)

    def test_no_device(self):
        self.assertEqual(self.engine(FAKE_CUDA_COUNT=0), "none: the NVIDIA driver sees no GPU")
        self.expect(INVALID, *RUN, says="this machine has 0 GPUs", FAKE_CUDA_COUNT=0)


class Device(Base):
    def test_info(self):
        said = self.engine()
        self.assertTrue(said.startswith("ready: NVIDIA H200 (sm_90), driver CUDA 13.0; "), said)
        self.assertIn("kernels in the pack" if PACK.exists() else "no kernel pack", said)
        two = self.engine(FAKE_CUDA_COUNT=2, **chip(100))
        self.assertTrue(two.startswith("ready: NVIDIA Chip (sm_100), NVIDIA Chip (sm_100), driver CUDA 13.0; "), two)
        gpus = json.loads(self.expect(RIGHT, "info", "--json", FAKE_CUDA_COUNT=2).stdout)["gpus"]
        self.assertEqual((gpus["count"], gpus["driver"]), (2, "CUDA 13.0"))

    def test_names(self):
        plan = ["plan", LINE, "--device"]
        self.expect(INVALID, *plan, "cuda:7", says='device is "cuda:7"; this machine has 1 GPU, cuda:0.')
        self.expect(INVALID, *plan, "cuda:x", says='a GPU of this machine is "cuda" or "cuda:N"')
        self.expect(INVALID, *RUN, "--device", "h200", says="a run is on host or on cuda:N")

    def test_chips(self):
        for arch in (60, 72):
            says = f"cuda.general: device NVIDIA Chip is sm_{arch}; the kernels' instructions begin with sm_75"
            self.expect(UNSUPPORTED, *PLAN, says=says, **chip(arch))
        says = "cuda.general: q is bf16 and device NVIDIA Chip is sm_75; its tensor cores take f16"
        self.expect(UNSUPPORTED, *PLAN, says=says, **chip(75))
        half = [word.replace("bf16", "f16") for word in PLAN]
        self.expect(RIGHT, *half, says=["NVIDIA Chip (sm_75, 132 SMs)", "1 attend   cuda.general"], **chip(75))
        for arch in (80, 86, 89, 90, 100, 121, 130):
            attends = "1 attend   cuda.sm90" if arch == 90 else "1 attend   cuda.portable"
            says = [f"NVIDIA Chip (sm_{arch}, 132 SMs)", attends]
            self.expect(RIGHT, *PLAN, says=says, **chip(arch))
        lacks = "cuda.portable: a block needs 51968 bytes of shared memory, device NVIDIA Chip has 50000"
        self.expect(RIGHT, *PLAN, says=[lacks, "1 attend   cuda.general"], **chip(90, 50000))
        says = ["cuda.general: a block needs ", "of shared memory for dims 64 and 64, device NVIDIA Chip has 5000"]
        self.expect(UNSUPPORTED, *PLAN, says=says, **chip(90, 5000))


@unittest.skipUnless(PACK.exists(), "this build has no kernel pack")
class Pack(Base):
    def test_list(self):
        rows = self.kernels()
        for spec in {row["kernel"] for row in rows}:
            targets = {"sm_90"} if spec.startswith("sm90") else {"sm_80", "sm_90", "sm_100", "sm_120", "compute_80"}
            if spec.startswith("general") and "bf16" not in spec and "tf32" not in spec:
                targets.add("sm_75")
            self.assertEqual(sorted(row["target"] for row in rows if row["kernel"] == spec), sorted(targets), spec)
        for row in rows:
            self.assertEqual((row["spill_bytes"], row["origin"]), (0, "pack"), row)
            self.assertGreater(row["code_bytes"], 1000, row)
            self.assertEqual(row["registers"] > 0, row["target"].startswith("sm_"), row)
            blocks = 2 if row["threads"] <= 128 else 1  # a multiprocessor, at least
            self.assertLessEqual(row["registers"] * row["threads"] * blocks, 65536, row)
        table = self.expect(RIGHT, "kernels", fake=False).stdout
        self.assertEqual(len(table.splitlines()), 1 + len(rows))

    def test_dump(self):
        self.expect(RIGHT, "kernels", "dump", self.folder / "new", fake=False)
        files, rows = list((self.folder / "new").iterdir()), self.kernels()
        self.assertEqual(sorted(file.stat().st_size for file in files), sorted(row["code_bytes"] for row in rows))
        for file in files:
            content = file.read_bytes()
            if file.suffix == ".cubin":
                self.assertTrue(content.startswith(b"\x7fELF"), file)
            else:
                self.assertEqual(file.suffix, ".ptx")
                self.assertIn(b".target sm_80", content)
            self.assertIn(f"tessera_{file.name.split('.')[0]}".encode(), content)
        (self.folder / "file").write_text("mine")
        self.expect(INVALID, "kernels", "dump", self.folder / "file", says="Not a directory", fake=False)

    def test_a_run_is_launched(self):
        self.expect(RIGHT, *RUN, says="cuda.sm90")
        for arch in (86, 110, 130):
            self.expect(RIGHT, *RUN, **chip(arch))
        # The fake computes nothing: out stays NaN, and a check must find it.
        self.expect(WRONG, *CHECK, "--engine", "cuda", says="inf or nan differ")
        self.assertFalse(self.cache.exists(), "something was compiled that is in the pack")

    def test_newer_than_the_driver(self):
        compiler = int(PACK.read_bytes().split(b"\ncompiler ")[1].split(b"\n")[0])
        if compiler < 13000 or OLD_NVRTC:
            self.skipTest("the pack is not of NVRTC 13, or an NVRTC of CUDA 12 compiles for this driver")
        made = f"the kernel pack was made by NVRTC {compiler // 1000}.{compiler % 1000 // 10}"
        says = f"{made}, whose code needs a driver of CUDA 13.0; this one is 12.8; and here: "
        self.expect(INVALID, *RUN, says=says, FAKE_CUDA_VERSION=12080)
        self.expect(RIGHT, *PLAN, FAKE_CUDA_VERSION=12080)

    def test_what_the_driver_says_of_the_code(self):
        self.expect(INVALID, *RUN, says="for sm_90: the CUDA driver says 218 (", FAKE_CUDA_LOAD=218)


class Build(Base):
    def build(self, code, *arguments, **options):
        return self.expect(code, "kernels", "build", self.folder / "my.pack", *arguments, fake=False, **options)

    @needs_nvrtc
    def test_build(self):
        self.build(RIGHT, "--targets", "sm_90")
        self.assertEqual([file.name for file in self.folder.iterdir()], ["my.pack"])
        with open(self.folder / "my.pack", "rb") as file:
            head = [file.readline().decode().strip() for _ in range(4)]
            rows = [file.readline().decode().split(maxsplit=6) for _ in range(int(head[3].split()[1]))]
        self.assertEqual(head[0], "tessera-pack 2")
        self.assertEqual({row[0] for row in rows}, {"sm_90"})
        specs = [row[6].strip() for row in rows]
        self.assertEqual(set(specs), {row["kernel"] for row in self.kernels()})

    @needs_nvrtc
    def test_targets_that_are_none(self):
        says = "it must be such as sm_90 (machine code) or compute_80 (PTX)"
        for targets in ("nonsense", "sm_", "sm_x", "sm_90a", "sm_9x", "90", "sm-90", "sm_-90", "compute_", "sm_90,,"):
            self.build(INVALID, "--targets", targets, says=says)
        self.build(INVALID, "--targets", "sm_31", says="the oldest chip that has kernels is sm_75")
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_a_compiler_that_is_none(self):
        self.build(INVALID, "--nvrtc", "/nowhere/libnvrtc.so", says="/nowhere/libnvrtc.so cannot be opened")
        self.build(INVALID, "--nvrtc", "libm.so.6", says="libm.so.6 lacks nvrtc")

    def test_usage(self):
        self.expect(INVALID, "kernels", "build", says="FILE", fake=False)
        self.expect(INVALID, "kernels", "dump", says="FOLDER", fake=False)
        self.expect(INVALID, "kernels", "melt", says="melt", fake=False)


class NoPack(Base):
    """The library in a folder of its own."""

    def setUp(self):
        super().setUp()
        self.own = self.folder / "own"
        self.own.mkdir()
        shutil.copy(LIBRARY, self.own)
        self.pack = self.own / "tessera.pack"
        self.here = {"LD_LIBRARY_PATH": f"{self.own}:{os.environ.get('LD_LIBRARY_PATH', '')}"}

    def expect_no_pack(self, sentence):
        self.assertTrue(self.engine(**self.here).endswith("; " + sentence))
        self.expect(INVALID, "kernels", "dump", self.folder / "dump", says=sentence, fake=False, **self.here)

    def test_list(self):
        rows = self.kernels(**self.here)
        for row in rows:
            self.assertEqual((row["target"], row["origin"]), ("any", "compiled at first use"))
            self.assertEqual((row["registers"], row["code_bytes"]), (0, 0))
            self.assertGreaterEqual(row["shared_bytes"], 0, row)
        self.assertGreaterEqual(len(rows), 4)
        self.assertEqual({row["kernel"] for row in rows}, {row["kernel"] for row in self.kernels()})  # as with a pack

    def test_none(self):
        self.expect_no_pack(f"no kernel pack: {self.pack} cannot be read")

    def test_a_broken_one(self):
        self.pack.write_text("tessera-pack 2\nsources 0123\n")
        self.expect_no_pack("the kernel pack is broken: its head ends early; build it again")

    def test_one_of_other_sources(self):
        self.pack.write_text("tessera-pack 2\nsources 0123\ncompiler 13000\nkernels 0\n")
        self.expect_no_pack(f"the kernel pack {self.pack} was made of other sources than this library; build it again")

    @unittest.skipIf(SANITIZER, "a sanitizer's own dlopen comes first")
    def test_nor_a_compiler(self):
        self.here["LD_PRELOAD"] = FAKE / "libfake_no_nvrtc.so"
        missing = "no NVRTC: libnvrtc.so.13 and libnvrtc.so.12 cannot be opened"
        says = f"cannot be had: no kernel pack: {self.pack} cannot be read; and here: {missing}"
        ran = self.expect(INVALID, *RUN, says=says, **self.here)
        self.assertEqual(len(ran.stderr.splitlines()), 1, ran.stderr)
        self.expect(INVALID, "kernels", "build", self.folder / "my.pack", says=missing, fake=False, **self.here)

    @needs_nvrtc
    def test_but_a_compiler(self):
        self.expect(RIGHT, *RUN, says="cuda.sm90", **self.here)
        (kept,) = self.cache.iterdir()
        self.assertTrue(kept.name.startswith("sm_90-"), kept)
        time, whole = kept.stat().st_mtime_ns, kept.read_bytes()
        self.expect(RIGHT, *RUN, **self.here)
        self.assertEqual(kept.stat().st_mtime_ns, time, "it was compiled again")
        kept.write_bytes(whole[: len(whole) // 2])
        self.expect(RIGHT, *RUN, **self.here)
        self.assertEqual(kept.read_bytes(), whole)
        self.assertEqual(list(self.cache.iterdir()), [kept])
        (self.folder / "file").write_text("")
        self.expect(RIGHT, *RUN, TESSERA_CACHE=self.folder / "file/under", **self.here)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    unittest.main(argv=sys.argv[:1], verbosity=1)

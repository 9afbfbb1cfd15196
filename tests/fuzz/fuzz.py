#!/usr/bin/env python3
"""Fuzzes one target from a fresh seed corpus. usage: fuzz.py TARGET SECONDS [libFuzzer options]
TARGET is the path of fuzz_line, fuzz_tensors or fuzz_run. Exit 0: nothing found; 1: something, and how to replay it."""
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
LONGEST = {"fuzz_line": 400, "fuzz_tensors": 4096, "fuzz_run": 200}  # bytes of an input
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I32": 4, "BOOL": 1, "F8_E4M3": 1}


def lines():
    for path in sorted((HERE.parent.parent / "cases").glob("*.txt")):
        yield from path.read_text(encoding="utf-8").splitlines()
    yield from (HERE / "line.txt").read_text(encoding="utf-8").splitlines()


def safetensors(tensors):
    """All bytes 0, which is a sound value of every tensor."""
    header, end = {"__metadata__": {"line": "forward d8"}}, 0
    for name, (dtype, *shape) in tensors.items():
        begin, size = end, BYTES[dtype]
        for extent in shape:
            size *= extent
        end += size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def seeds_of(target):
    if target == "fuzz_line":
        for line in lines():
            if line.strip() and not line.startswith("#"):
                yield line.encode()
    if target == "fuzz_tensors":
        # Files for the lines of tensors.cc.
        yield safetensors({
            "q": ("F32", 2, 2, 2, 2), "k": ("F32", 2, 3, 1, 2), "v": ("F32", 2, 3, 1, 2), "bias": ("F32", 1, 2, 1, 3),
            "keep": ("BOOL", 1, 1, 2, 3), "exclude_keys": ("BOOL", 2, 3), "slopes": ("F32", 2), "sinks": ("F32", 2)})
        yield safetensors({
            "q": ("BF16", 3, 2, 1), "k": ("BF16", 2, 1, 1), "v": ("BF16", 2, 1, 1), "out": ("BF16", 3, 2, 1),
            "lse": ("F32", 2, 3), "dout": ("BF16", 3, 2, 1), "dlse": ("F32", 2, 3)})
        yield safetensors({
            "q": ("F32", 2, 1, 1, 2), "k": ("F8_E4M3", 4, 2, 1, 2), "v": ("F8_E4M3", 4, 2, 1, 2),
            "k_new": ("F32", 2, 1, 1, 2), "v_new": ("F32", 2, 1, 1, 2), "cos": ("F32", 4, 1), "sin": ("F32", 4, 1),
            "k_scale": ("F32", 4, 2), "v_scale": ("F32", 1), "cache_lens": ("I32", 2), "cache_batch_idx": ("I32", 2),
            "left_pad": ("I32", 2), "page_table": ("I32", 2, 2)})
        yield safetensors({})
    if target == "fuzz_run":
        for _ in range(200):  # short inputs choose little
            yield os.urandom(LONGEST[target])
    found = HERE / f"{target.removeprefix('fuzz_')}.hex"  # what was found before: bytes in hex, # and a word on it
    if found.exists():
        for line in found.read_text(encoding="utf-8").splitlines():
            yield bytes.fromhex(line.split("#")[0])


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    target = pathlib.Path(sys.argv[1]).resolve()
    work = target.parent / target.name.removeprefix("fuzz_")
    corpus, found = work / "corpus", work / "found"
    shutil.rmtree(corpus, ignore_errors=True)
    corpus.mkdir(parents=True)
    found.mkdir(exist_ok=True)
    for n, seed in enumerate(seeds_of(target.name)):
        (corpus / f"seed{n}").write_bytes(seed)
    words = HERE / f"{target.name.removeprefix('fuzz_')}.dict"
    before = set(found.iterdir())
    command = [
        str(target), f"-max_total_time={sys.argv[2]}", f"-max_len={LONGEST[target.name]}", "-len_control=0",
        "-timeout=20", "-rss_limit_mb=2048", "-malloc_limit_mb=256", f"-artifact_prefix={found}/"]
    if words.exists():
        command.append(f"-dict={words}")
    command += sys.argv[3:] + [str(corpus)]
    print(" ".join(command), flush=True)
    code = subprocess.run(command).returncode
    for path in sorted(set(found.iterdir()) - before):
        print(f"found {path}\n  replay: {target} --show {path}\n"
              f"  reduce: {target} -minimize_crash=1 -max_total_time=60 {path}")
    sys.exit(code != 0)


if __name__ == "__main__":
    main()

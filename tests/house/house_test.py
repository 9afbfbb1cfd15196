#!/usr/bin/env python3
"""The rules of the house that a compiler does not see: who may include whom, and where asm, getenv and system headers
may stand. DESIGN.md says why. usage: house_test.py SOURCE_DIR. Exit 0: all kept; 1: broken, one line each."""
import pathlib
import re
import sys
import tempfile

SOURCES = {".h", ".hpp", ".c", ".cc", ".cu"}

# Whom a folder may include, by the folders that hold the headers; "public" is include/tessera/.
FLOORS = {
    "include": {"public"},
    "src/rules": {"src/rules"},
    "src/device": {"src/device", "src/rules"},
    "src/core": {"src/core", "src/rules", "public"},
    "src/reference": {"src/reference", "src/core", "public"},
    "src/cpu": {"src/cpu", "src/core", "src/rules", "public"},
    "src/cuda": {"src/cuda", "src/core", "src/rules", "public"},
    "src/api": {"src/api", "src/cuda", "src/cpu", "src/reference", "src/core", "src/rules", "public"},
    "tools": {"tools", "public"},
    "python": {"python", "public"},
    "bench": {"bench", "public"},
    "examples": {"examples", "public"},
}
NO_SYSTEM_HEADERS = ("src/rules", "src/device")  # NVRTC has none
ASM_HOME = "src/device/ptx"
GETENV_HOMES = ("tools", "src/cuda/cache", "tests/cuda/fake_libcuda")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)
COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S)
ASM = re.compile(r"\b(asm|__asm|__asm__)\b")
GETENV = re.compile(r"\b(secure_)?getenv\b")


def inside(path, folder):
    return path == folder or path.startswith(folder + "/") or path.startswith(folder + ".")


def home(root, path, kind, target):
    """The folder of FLOORS that holds an included file; None for system and library headers."""
    if target.startswith("tessera/") and (root / "include" / target).exists():
        return "public"
    places = [path.parent / target, root / "src" / target, root / target] if kind == '"' else [root / "src" / target]
    for place in places:
        if place.is_file():
            name = place.resolve().relative_to(root).as_posix()
            return "public" if inside(name, "include") else next((f for f in FLOORS if inside(name, f)), "elsewhere")
    return None


def check(path, root):
    name = path.relative_to(root).as_posix()
    text = path.read_text(encoding="utf-8")
    floor = next((f for f in FLOORS if inside(name, f)), None)  # None: tests, which may reach lower on purpose
    wrong = []
    for match in INCLUDE.finditer(text):
        kind, target = match.groups()
        line = text.count("\n", 0, match.start(1)) + 1
        if kind == "<" and any(inside(name, f) for f in NO_SYSTEM_HEADERS):
            wrong.append(f"{name}:{line}: includes <{target}>; NVRTC reads this file and has no system headers")
        found = home(root, path, kind, target)
        if floor and found and found not in FLOORS[floor]:
            may = ", ".join(sorted(FLOORS[floor]))
            wrong.append(f"{name}:{line}: {floor} includes {target} of {found}; it may include {may}")
        if kind == '"' and not found:
            wrong.append(f'{name}:{line}: "{target}" is no file of this tree; include what is outside with <>')
    code = COMMENT_OR_TEXT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
    for rule, homes, where in ((ASM, (ASM_HOME,), ASM_HOME + "/"), (GETENV, GETENV_HOMES, "tools/, the cache and the fake driver")):
        for match in rule.finditer(code):
            if not any(inside(name, h) for h in homes):
                line = code.count("\n", 0, match.start()) + 1
                wrong.append(f"{name}:{line}: {match.group()} may stand only in {where}")
    return wrong


def check_tree(root):
    root = root.resolve()
    files = [p for folder in ("src", "tools", "python", "tests", "bench", "include", "examples")
             for p in sorted((root / folder).rglob("*")) if p.suffix in SOURCES]
    return len(files), [line for path in files for line in check(path, root)]


def self_test():
    """A rule that cannot fail keeps nothing: a small tree that is right, then one fault at a time."""
    right = {
        "include/tessera/tessera.h": "#include <stdint.h>\n",
        "src/rules/mask.h": '#include "base.h"\n// #include <cmath> would be wrong; asm and getenv in words are not\n',
        "src/rules/base.h": "",
        "src/core/plan.h": '#include <vector>\n#include "rules/mask.h"\n#include "tessera/tessera.h"\n',
        "src/cpu/cpu.h": '#include "core/plan.h"\n',
        "src/reference/reference.h": '#include "core/plan.h"\n',
        "src/device/ptx/sm90.h": 'inline void f() { asm volatile("bar.sync 0;"); }\n',
        "src/api/c_api.cc": '#include "cpu/cpu.h"\n#include "reference/reference.h"\n',
        "tools/tessera/main.cc": '#include <tessera/tessera.h>\n#include "files.h"\nauto x = getenv("HOME");\n',
        "tools/tessera/files.h": "",
        "tests/core/plan_test.cc": '#include <gtest/gtest.h>\n#include "core/plan.h"\n',
    }
    faults = {
        "rules up": ("src/rules/mask.h", '#include "core/plan.h"\n'),
        "rules and the public header": ("src/rules/mask.h", '#include "tessera/tessera.h"\n'),
        "core up": ("src/core/plan.h", '#include "cpu/cpu.h"\n'),
        "core up by a relative path": ("src/core/plan.h", '#include "../cpu/cpu.h"\n'),
        "core up in angles": ("src/core/plan.h", "#  include <cpu/cpu.h>\n"),
        "engines sideways": ("src/cpu/cpu.h", '#include "reference/reference.h"\n'),
        "the oracle takes a rule": ("src/reference/reference.h", '#include "rules/mask.h"\n'),
        "tools below the public headers": ("tools/tessera/main.cc", '#include "core/plan.h"\n'),
        "the public header down": ("include/tessera/tessera.h", '#include "core/plan.h"\n'),
        "a system header in rules": ("src/rules/base.h", "#include <cmath>\n"),
        "a system header in device": ("src/device/ptx/sm90.h", "#include <cstdint>\n"),
        "asm outside ptx": ("src/cpu/cpu.h", 'inline void f() { __asm__("nop"); }\n'),
        "getenv in core": ("src/core/plan.h", 'auto x = std::getenv("TESSERA");\n'),
        "a file that is not there": ("src/core/plan.h", '#include "core/gone.h"\n'),
    }
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in right.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        _, wrong = check_tree(root)
        assert not wrong, f"the right tree is refused: {wrong}"
        for fault, (name, text) in faults.items():
            (root / name).write_text(right[name] + text)
            _, wrong = check_tree(root)
            assert len(wrong) >= 1 and all(line.startswith(name) for line in wrong), f"{fault}: {wrong}"
            (root / name).write_text(right[name])
    return len(faults)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    faults = self_test()
    files, wrong = check_tree(pathlib.Path(sys.argv[1]))
    for line in wrong:
        print(line)
    print(f"{files} files, {len(wrong)} broken rules; the self-test planted {faults} faults and found them")
    sys.exit(1 if wrong or files == 0 else 0)


if __name__ == "__main__":
    main()

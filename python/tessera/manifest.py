"""What a result was made with."""

from __future__ import annotations

import platform
import sys
from typing import Any

from . import _tessera


def manifest() -> dict[str, Any]:
    """Library, build, Python, NumPy, torch, device, driver and CUDA, as JSON can hold it; None where there is none."""
    name, _, threads = _tessera.device("host")
    build = dict(line.split("\t", 1) for line in _tessera.build_info().splitlines())
    return {
        "tessera": _tessera.VERSION,
        "library": _tessera.__file__,
        "build": build,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "numpy": _version("numpy"),
        "torch": _version("torch"),
        "device": _processor() or name,
        "threads": threads,
        **_gpu(),
    }


def _version(module: str) -> str | None:
    loaded = sys.modules.get(module)
    return str(loaded.__version__) if loaded else None


def _processor() -> str | None:
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
    except OSError:
        return None


def _gpu() -> dict[str, Any]:
    """As torch tells, where it is loaded."""
    torch = sys.modules.get("torch")
    facts: dict[str, Any] = {"gpu": None, "driver": None, "cuda": None}
    if torch is None:
        return facts
    facts["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["driver"] = _driver()
    return facts


def _driver() -> str | None:
    try:
        with open("/proc/driver/nvidia/version") as file:
            return file.readline().strip()
    except OSError:
        return None

"""Tessera: exact attention, tile by tile. One written contract (docs/contract.md) that every engine obeys.

>>> import numpy, tessera
>>> q, k, v = numpy.random.default_rng(0).standard_normal((3, 2, 128, 8, 64), dtype=numpy.float32)
>>> r = tessera.attention(q, k, v, mask="causal")
>>> r.out.shape
(2, 128, 8, 64)
"""

from . import _tessera
from .attention import attention
from .cache import NAMES_OF_DECODE, Level, append, cascade, decode
from .calls import BACKWARD_NAMES, Result, ResultWithMax
from .manifest import manifest
from .mask import Mask
from .parts import dropout_mask, merge
from .plans import Plan, plan
from .tracing import Trace
from .tracing import Trace as trace

__version__ = _tessera.VERSION
if _unknown := {*BACKWARD_NAMES, *NAMES_OF_DECODE} - set(_tessera.NAMES):
    raise ImportError(
        f"{_tessera.__file__} (version {__version__}) knows no operand {_unknown.pop()}: it is not of one build with "
        f"{__file__}. Install the package anew."
    )
__all__ = [
    "Level",
    "Mask",
    "Plan",
    "Result",
    "ResultWithMax",
    "Trace",
    "append",
    "attention",
    "cascade",
    "decode",
    "dropout_mask",
    "manifest",
    "merge",
    "plan",
    "trace",
]

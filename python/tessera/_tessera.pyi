"""The extension module: Tessera's C interface. Arrays are NumPy's, torch's, or anything with __dlpack__."""

from typing import Any, Callable

VERSION: str
NAMES: tuple[str, ...]
DTYPES: tuple[str, ...]

_Four = tuple[int, ...]  # four

class Problem:
    """Shapes, strides, dtypes and options; never a pointer. include/tessera/tessera.h documents every field."""

    pass_: int
    deterministic: int
    batch_invariant: int
    allow_tf32: int
    has_scale: int
    scale: float
    softcap: float
    dropout: float
    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int
    rows_q: int
    rows_k: int
    len_new: int
    rows_new: int
    dim: int
    dim_v: int
    alignment: int
    corner: int
    causal: int
    corner_at: int
    has_window: int
    window_left_unbounded: int
    window_right_unbounded: int
    has_prefix: int
    window_left: int
    window_right: int
    prefix: int
    chunk: int
    first: int
    page_size: int
    pages: int
    rows: int
    slots: int
    ring: int
    v_in_k: int
    rotary_interleaved: int
    rotary_dim: int
    rotary_positions: int
    seed: int
    offset: int
    def __init__(self, line: str, /) -> None: ...
    def clear(self) -> None: ...
    def declare(self, name: int, dtype: int, extents: _Four, strides: _Four, /) -> None: ...
    def check(self) -> None: ...
    def text(self) -> str: ...
    def operands(self) -> dict[str, tuple[int, _Four, _Four]]: ...
    def values(self, name: int, /) -> list[int]: ...

class Plan:
    """Which kernel answers, what it takes, why not the others."""

    engine: str
    kernel: str
    device: str
    threads: int
    tile_rows: int
    tile_keys: int
    workspace_bytes: int
    bytes_read: int
    bytes_written: int
    score_bytes_avoided: int
    flops: float
    roofline_seconds: float
    line: str
    def __init__(
        self,
        problem: Problem | tuple[Problem, ...],
        device: str = "host",
        kernels: str | None = None,
        threads: int = 0,
        workspace_limit: int = -1,
        tile_rows: int = 0,
        tile_keys: int = 0,
        sample_pairs: int = 0,
        /,
    ) -> None: ...
    def text(self) -> str: ...
    def steps(self) -> list[str]: ...
    def reasons(self) -> list[tuple[str, str]]: ...
    def run(self, arrays: dict[str, Any] | tuple[dict[str, Any], ...], seed: int = 0, offset: int = 0, /) -> None: ...

class Caller:
    """Calls with the same options, planned once for each set of shapes, strides, dtypes and alignments."""

    def __init__(
        self,
        names: tuple[int, ...],
        make: Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Plan, tuple[Any, ...]]],
        result: type = ...,
        ours: int = 0,
        /,
    ) -> None: ...
    def call(self, arrays: tuple[Any, ...], seed: int, offset: int, stream: int | None, /) -> Any: ...

def merge(
    outs: tuple[Any, ...],
    lses: tuple[Any, ...],
    out: Any,
    lse: Any,
    dout: Any,
    dlse: Any,
    douts: tuple[Any, ...] | None,
    dlses: tuple[Any, ...] | None,
    out_order: _Four,
    lse_order: _Four,
    threads: int,
    /,
) -> None: ...
def dropout_mask(
    dropout: float, seed: int, offset: int, batch: int, head: int, heads_q: int, rows: int, keys: int, grid: Any, /
) -> None: ...
def verify(
    problem: Problem, arrays: dict[str, Any], seed: int, offset: int, sample_pairs: int, /
) -> list[dict[str, Any]]: ...
def describe(array: Any, /) -> tuple[int, int, int, tuple[int, ...], tuple[int, ...], bool, int]: ...
def set_dtypes(dtypes: dict[Any, int], /) -> None: ...
def build_info() -> str: ...
def device(name: str, /) -> tuple[str, int, int]: ...


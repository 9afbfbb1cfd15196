"""Which keys a query row sees."""

from __future__ import annotations

from typing import Any

ARRAYS = ("keep", "exclude_keys", "documents_q", "documents_k", "corner_offsets")
LETTERS = "abcdefghijklmnopqrstuvwxyz_0123456789 ()@&,-[]"
NO_ARRAYS = (None,) * len(ARRAYS)
Corner = Any  # "bottom_right", "top_left", a whole number, or int32 (B,)


class Mask:
    """Which keys a query row sees: parts joined with ``&``; a key is kept if all parts agree.

    Row i of a sequence with Lq queries and Lk keys stands at position p = i + offset on the key axis. ``corner`` fixes
    the offset: ``"bottom_right"`` (the default) is Lk - Lq, so that the last query sees as far as the last key;
    ``"top_left"`` is 0; a whole number, or an int32 array of one a sequence, is itself.

    >>> Mask.causal() & Mask.window(128, 0)
    Mask('causal&window(128,0)')
    >>> Mask("causal&first(4)") == Mask.causal() & Mask.first(4)
    True

    ``Mask(text)`` takes the spelling of problem lines. Masks never change; two with the same parts are equal, those with
    arrays only if the arrays are the same objects.
    """

    def __init__(self, text: str = "none"):
        if not isinstance(text, str) or not all([letter in LETTERS for letter in text]):
            raise ValueError(f"the mask is {text!r}; it must be a text of parts such as 'causal&window(128,0)'.")
        parts: dict[str, str] = {}
        corner = ""
        for part in text.replace(" ", "").split("&"):
            body, at, where = part.partition("@")
            name, bracket, inside = body.partition("(")
            if name in ("keep", "exclude_keys", "documents"):
                raise ValueError(f"mask part {name!r} needs an array; use Mask.{name}(...).")
            if at:
                corner = _one("corner", corner, "@" + where)
            if name not in ("none", "corner"):
                parts[name] = _one(name, parts.get(name, ""), bracket + inside or " ")
        self._set(parts, corner, {})

    def _set(self, parts: dict[str, str], corner: str, arrays: dict[str, Any]) -> None:
        self._parts, self._corner, self._arrays = parts, corner, arrays
        words = [name + parts[name].strip() for name in sorted(parts)]
        self._text = "&".join([*words, *(["corner" + corner] if corner else [])]) or "none"
        # What a call reads, in plain things that torch.compile of 2.4 understands.
        self.in_order = tuple([arrays.get(name) for name in ARRAYS])

    @classmethod
    def _part(cls, text: str, corner: Corner = None, **arrays: Any) -> Mask:
        mask = cls(text)
        where = ""
        if isinstance(corner, str):
            if corner not in ("bottom_right", "top_left"):
                raise ValueError(
                    f"corner is {corner!r}; it must be 'bottom_right', 'top_left', a whole number or an int32 array "
                    f"of one a sequence."
                )
            where = "@" + corner
        elif isinstance(corner, bool):
            raise ValueError(f"corner is {corner}; it must be a name, a whole number or an int32 array.")
        elif isinstance(corner, int) or (hasattr(corner, "__index__") and getattr(corner, "shape", None) == ()):
            where = f"@at({_whole('corner', corner)})"
        elif corner is not None:
            where = "@at(0)"
            arrays["corner_offsets"] = corner
        mask._set(mask._parts, where, arrays)
        return mask

    @classmethod
    def none(cls) -> Mask:
        """Every key that the sequence has."""
        return cls()

    @classmethod
    def causal(cls, corner: Corner = None) -> Mask:
        """Keys j <= p."""
        return cls._part("causal", corner)

    @classmethod
    def window(cls, left: int | None, right: int | None, corner: Corner = None) -> Mask:
        """Keys p - left <= j <= p + right, both ends inclusive and signed; None is unbounded. left + right < 0 keeps
        nothing. For "n tokens, itself included" use :meth:`last`."""
        ends = ",".join("unbounded" if end is None else str(_whole("window", end)) for end in (left, right))
        return cls._part(f"window({ends})", corner)

    @classmethod
    def last(cls, n: int, corner: Corner = None) -> Mask:
        """The last n tokens, the row's own included: window(n - 1, 0)."""
        if _whole("last", n) < 1:
            raise ValueError(f"last is {n}; a token sees at least itself, 1.")
        return cls.window(n - 1, 0, corner)

    @classmethod
    def chunk(cls, n: int, corner: Corner = None) -> Mask:
        """Keys of the row's own chunk: floor(j / n) == floor(p / n)."""
        return cls._part(f"chunk({_whole('chunk', n)})", corner)

    @classmethod
    def prefix(cls, n: int, corner: Corner = None) -> Mask:
        """Keys j < n or j <= p; replaces causal."""
        return cls._part(f"prefix({_whole('prefix', n)})", corner)

    @classmethod
    def first(cls, n: int) -> Mask:
        """Beside a window: keys j < n too (attention to the first tokens)."""
        return cls._part(f"first({_whole('first', n)})")

    @classmethod
    def keep(cls, array: Any) -> Mask:
        """A bool array that broadcasts to (B, Hq, Sq, Sk), 4 dimensions of which any may be 1: True keeps."""
        return cls._part("none", keep=_given("keep", array))

    @classmethod
    def exclude_keys(cls, array: Any) -> Mask:
        """A bool array (B, Sk): True excludes that key of that sequence for all rows (key padding)."""
        return cls._part("none", exclude_keys=_given("exclude_keys", array))

    @classmethod
    def documents(cls, ids_q: Any, ids_k: Any = None) -> Mask:
        """int32 (B, Sq) and (B, Sk), packed (rows,): a row sees keys of its own document, ids equal and >= 0. Without
        ids_k they are ids_q."""
        return cls._part("none", documents_q=_given("ids_q", ids_q), documents_k=ids_q if ids_k is None else ids_k)

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        parts, corner, arrays = dict(self._parts), self._corner, dict(self._arrays)
        for name, value in other._parts.items():
            parts[name] = _one(name, parts.get(name, ""), value)
        if other._corner:
            corner = _one("corner", corner, other._corner)
        for name, array in other._arrays.items():
            if arrays.setdefault(name, array) is not array:
                raise ValueError(f"both masks have {name}; join the arrays first.")
        both = Mask()
        both._set(parts, corner, arrays)
        return both

    @property
    def text(self) -> str:
        """The parts that problem lines spell; those with arrays are in :attr:`arrays`."""
        return self._text

    @property
    def arrays(self) -> dict[str, Any]:
        """keep, exclude_keys, documents_q, documents_k and corner_offsets, as far as given."""
        return dict(self._arrays)

    def __repr__(self) -> str:
        arrays = "".join(f", {name}" for name in self._arrays)
        return f"Mask({self.text!r}{arrays})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        same = self._arrays.keys() == other._arrays.keys()
        return same and self.text == other.text and all(a is other._arrays[n] for n, a in self._arrays.items())

    def __hash__(self) -> int:
        return hash(self.text)


def _given(name: str, array: Any) -> Any:
    if array is None:
        raise ValueError(f"{name} is None; a mask without its array would keep every key. Leave the part out.")
    return array


def _whole(name: str, n: int) -> int:
    if type(n) is int:
        return n
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise ValueError(f"{name} is {n!r}; it must be a whole number.")
    return n.__index__()


def _one(name: str, old: str, new: str) -> str:
    if old and old != new:
        raise ValueError(f"the mask says {name} twice, {old.strip() or name} and {new.strip() or name}; say it once.")
    return new

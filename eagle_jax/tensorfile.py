"""GGUF and safetensors files: what is in them, without reading the tensors yet.

A file becomes a table from tensor name to `Stored`. Nothing that a header claims is
believed before the length of the file bears it out, so a damaged or hostile file ends in
a ValueError and never makes room for more than it holds.
"""

import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eagle_jax import jsonfile


class Stored(NamedTuple):
    """A tensor that still lies in its file: its shape, and the call that reads it."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    is_float: bool = True


class Gguf(NamedTuple):
    """A GGUF file: all metadata, and its tensors by name."""

    fields: dict[str, Any]
    tensors: dict[str, Stored]


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Finds the tensors of a safetensors file.

    Raises:
      ValueError: not such a file, not a whole one, or of types that NumPy lacks.
    """
    import safetensors

    size = path.stat().st_size
    try:
        file = safetensors.safe_open(path, framework="np")
    except safetensors.SafetensorError as err:
        raise ValueError(
            f"{path} ({size} bytes) is not a whole safetensors file, "
            f"{_safetensors_size(path)} expected ({err}); fetch it again"
        ) from err
    tensors, faults = {}, []
    for name in file.keys():
        head = file.get_slice(name)
        kind = head.get_dtype()
        if kind not in _NUMPY_KINDS:
            faults.append(f"{name} ({kind})")
        tensors[name] = Stored(
            tuple(head.get_shape()),
            lambda name=name: file.get_tensor(name),
            is_float="F" in kind,
        )
    if faults:
        raise ValueError(f"{path} holds unreadable types: {', '.join(faults)}")
    return tensors


_NUMPY_KINDS = frozenset("F64 F32 F16 BF16 I64 I32 I16 I8 U64 U32 U16 U8 BOOL".split())


def _safetensors_size(path: Path) -> str:
    with path.open("rb") as file:
        n = int.from_bytes(file.read(8), "little")
        try:
            header = jsonfile.parse(file.read(min(n, 1 << 27)))
            ends = [v["data_offsets"][1] for k, v in header.items() if k[:1] != "_"]
            return f"{8 + n + max(ends)} bytes"
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return f"a header of {n} bytes, then the tensors"


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
_SCALARS |= {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def read_gguf(path: Path) -> Gguf:
    """Reads a GGUF file's metadata and finds its tensors (ggml docs/gguf.md, v2, v3).

    The header is parsed here because the gguf package takes seconds over a vocabulary
    and cannot say how long a truncated file should be; it does expand the tensors.

    Raises:
      ValueError: not a GGUF file, or not a whole one.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} does not begin like a GGUF file; fetch it again")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    at = 4

    def take(form: str) -> tuple[Any, ...]:
        nonlocal at
        values = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return values

    def string() -> str:
        (n,) = take("Q")
        return take(f"{n}s")[0].decode()

    def value(kind: int) -> Any:
        if kind == _STRING:
            return string()
        if kind != _ARRAY:
            return take(_SCALARS[kind])[0]
        inner, n = take("IQ")
        if inner == _STRING:
            return [string() for _ in range(n)]
        # Arrays of arrays, which no writer makes, fail here as an unknown type.
        return list(take(f"{n}{_SCALARS[inner]}"))

    fields, heads = {}, []
    try:
        version, n_tensors, n_fields = take("IQQ")
        if version not in (2, 3):
            raise ValueError(
                f"{path} is GGUF version {version}; versions 2 and 3 are read"
            )
        for _ in range(n_fields):
            name = string()
            fields[name] = value(*take("I"))
        for _ in range(n_tensors):
            name, (n_dims,) = string(), take("I")
            heads.append((name, take(f"{n_dims}Q")[::-1], *take("IQ")))
    except (struct.error, KeyError, OverflowError, UnicodeDecodeError) as err:
        raise ValueError(
            f"{path} ({len(data)} bytes) is not a whole GGUF file: its header is cut "
            f"off or damaged at byte {at}; fetch it again"
        ) from err
    align = fields.get("general.alignment", 32)
    if type(align) is not int or align < 1:
        raise ValueError(f"{path}: general.alignment={align!r:.40} is no size")
    return Gguf(fields, _gguf_tensors(path, data, -(-at // align) * align, heads))


def _gguf_tensors(
    path: Path, data: mmap.mmap, start: int, heads: list[tuple[Any, ...]]
) -> dict[str, Stored]:
    import gguf

    tensors, needed, total = {}, 0, 0
    for name, shape, code, offset in heads:
        try:
            kind = gguf.GGMLQuantizationType(code)
            if not shape or min(shape) < 1:
                raise ValueError(f"shape {shape} is empty")
            rows = gguf.quant_shape_to_byte_shape(shape, kind)
        except (ValueError, KeyError) as err:
            raise ValueError(
                f"{path}: {name} has unknown type or shape ({err})"
            ) from err
        begin, n = start + offset, math.prod(rows)
        needed, total = max(needed, begin + n), total + n

        def read(name=name, kind=kind, rows=rows, begin=begin, n=n) -> np.ndarray:
            raw = np.frombuffer(data, np.uint8, n, begin).reshape(rows)
            try:
                # Spare bits of damaged blocks make infinities, which decoding reports.
                with np.errstate(all="ignore"):
                    return gguf.dequantize(raw, kind)
            except NotImplementedError as err:
                raise ValueError(
                    f"{path}: {name} has type {kind.name}, which cannot be expanded"
                ) from err

        tensors[name] = Stored(tuple(shape), read)
    if len(data) < needed:
        raise ValueError(
            f"{path} has {len(data)} bytes, its header asks for {needed}: it was cut "
            f"off; fetch it again"
        )
    if total > max(len(data) - start, 0) or len(tensors) < len(heads):
        raise ValueError(
            f"{path}: tensors overlap or occur twice in its header; fetch it again"
        )
    return tensors

"""Reads `pytorch_model.bin` files without torch and without running what is in them.

Such a file is a zip: `<name>/data.pkl` describes the tensors, `<name>/data/<key>` holds
the bytes of each storage. The pickle may name three kinds of things (`OrderedDict`,
torch's tensor builder, storage types); any other name, and any pickle operation that a
weights file does not need, is refused before it has an effect. Nothing larger than the
file is allocated.
"""

import collections
import io
import math
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

_STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
_OPERATIONS = frozenset(
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT "
    "BINUNICODE SHORT_BINUNICODE EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 "
    "TUPLE3 APPEND APPENDS SETITEM SETITEMS BINPUT LONG_BINPUT MEMOIZE BINGET GLOBAL "
    "LONG_BINGET STACK_GLOBAL BINPERSID REDUCE BUILD".split()
)
_MAX_PICKLE = 64 << 20  # names and shapes of a million tensors; weights lie outside


def read(path: str | Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a state dict saved by `torch.save` (torch 1.6 or later).

    bfloat16 comes as `ml_dtypes.bfloat16`. Arrays may be read-only and share memory.

    Raises:
      ValueError: not such a file, cut off, damaged, or asking for anything but tensors.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            state = _load(archive, path.stat().st_size)
    except (OSError, MemoryError):
        raise
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"{path} is not a torch zip file ({error}); if it is complete it may be of "
            f"the format before torch 1.6: load and save it again with a newer torch"
        ) from error
    except Exception as error:  # pickle and zip fail in too many ways to list
        raise ValueError(f"{path} cannot be read as torch weights: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(
            f"{path} holds a {type(state).__name__}, not a dict of tensors"
        )
    other = [k for k, v in state.items() if not isinstance(v, np.ndarray)]
    other += [k for k in state if not isinstance(k, str)]
    if other:
        names = ", ".join(sorted(str(k)[:60] for k in other[:8]))
        raise ValueError(
            f"{path} holds {len(other)} entries that are no tensors: {names}"
        )
    return dict(state)


def _load(archive: zipfile.ZipFile, file_size: int) -> Any:
    entries = {info.filename: info for info in archive.infolist()}
    # Entries of a hostile zip may be packed or overlap: more bytes than the file has.
    if any(info.compress_type != zipfile.ZIP_STORED for info in entries.values()):
        raise ValueError("compressed entries, which torch never writes")
    if sum(info.file_size for info in entries.values()) > file_size:
        raise ValueError("entries larger than the file")
    pickles = [name for name in entries if name.endswith("data.pkl")]
    if len(pickles) != 1:
        raise ValueError(f"expected one data.pkl, found {len(pickles)}")
    root = pickles[0].removesuffix("data.pkl")
    if root + "byteorder" in entries and archive.read(root + "byteorder") != b"little":
        raise ValueError("big-endian data; save it again on a little-endian machine")
    if entries[pickles[0]].file_size > _MAX_PICKLE:
        raise ValueError(f"data.pkl has {entries[pickles[0]].file_size} bytes")
    data = archive.read(pickles[0])
    _check_operations(data)
    state = _Unpickler(io.BytesIO(data)).load()
    storages: dict[str, np.ndarray] = {}

    def storage(claim: Any) -> np.ndarray:
        if type(claim) is not _Storage or not isinstance(claim.key, str):
            raise ValueError("a tensor without a storage")
        dtype, info = _STORAGES[claim.kind], entries.get(f"{root}data/{claim.key}")
        if info is None:
            raise ValueError(f"storage {claim.key!r} is missing")
        if not _is_size(claim.count) or info.file_size != claim.count * dtype.itemsize:
            raise ValueError(
                f"storage {claim.key!r} has {info.file_size} bytes, not the "
                f"{claim.count} numbers of type {dtype} that the pickle claims"
            )
        if claim.key not in storages:
            storages[claim.key] = np.frombuffer(archive.read(info), np.uint8)
        raw = storages[claim.key]
        return raw != 0 if dtype == np.bool_ else raw.view(dtype)

    if not isinstance(state, dict):
        return state
    return {
        name: _cut(storage(value.storage), value) if type(value) is _Tensor else value
        for name, value in state.items()
    }


def _check_operations(data: bytes) -> None:
    for operation, argument, _ in pickletools.genops(data):
        if operation.name not in _OPERATIONS:
            raise ValueError(f"pickle operation {operation.name} is not allowed")
        # The C unpickler makes room for the largest memo index it meets.
        if operation.name == "LONG_BINPUT" and argument > len(data):  # type: ignore
            raise ValueError(f"pickle memo index {argument} is out of range")


# What the unpickler builds: tuples, because a pickle can call `__setstate__` of arrays
# and dtypes, or set attributes of classes, but can do nothing to a tuple.
class _Storage(NamedTuple):
    kind: str
    key: Any
    count: Any


class _Tensor(NamedTuple):
    storage: Any
    offset: Any
    shape: Any
    strides: Any


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            # A new function each time, so that setting its attributes has no effect.
            return lambda *arguments: _Tensor(*arguments[:4])
        if module == "torch" and name in _STORAGES:
            return name
        raise ValueError(f"it names {module}.{name}, which weights do not need")

    def persistent_load(self, pid: Any) -> _Storage:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
            raise ValueError("unknown kind of storage")
        if pid[1] not in _STORAGES:
            raise ValueError("unknown type of storage")
        return _Storage(pid[1], pid[2], pid[4])


def _cut(storage: np.ndarray, claim: _Tensor) -> np.ndarray:
    """Cuts a tensor out of its storage; offset and strides count numbers, not bytes."""
    _, offset, shape, strides = claim
    if not (isinstance(shape, tuple) and isinstance(strides, tuple)):
        raise ValueError("a tensor without shape or strides")
    if len(shape) != len(strides) or not all(map(_is_size, (offset, *shape, *strides))):
        raise ValueError("a tensor whose shape, strides and offset do not go together")
    if 0 in shape:
        return np.zeros(shape, storage.dtype)
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    # The second test refuses stride 0, which makes any size out of one number.
    if last >= storage.size or math.prod(shape) > storage.size:
        raise ValueError(f"a tensor of shape {shape} reaches beyond its storage")
    step = storage.dtype.itemsize
    view = np.lib.stride_tricks.as_strided(
        storage[offset:], shape, tuple(s * step for s in strides), writeable=False
    )
    return view if view.flags.c_contiguous else view.copy()


def _is_size(n: Any) -> bool:
    return type(n) is int and 0 <= n < 1 << 48

"""Reads `pytorch_model.bin` files without torch and without running what is in them.

Such a file is a zip: `<name>/data.pkl` describes the tensors, `<name>/data/<key>` holds
the bytes of each storage. The pickle is not unpickled but read by a small machine that
knows the operations of a state dict and three kinds of names (`OrderedDict`, torch's
tensor builder, storage types); anything else is refused. It builds tuples and dicts
with text keys only, so there is nothing to run, and nothing much larger than the file is
allocated.
"""

import functools
import math
import pickletools
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from eagle_jax.tensorfile import Stored

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
_MAX_PICKLE = 16 << 20  # names and shapes of 200,000 tensors; weights lie outside


def read(path: str | Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a state dict saved by `torch.save` (torch 1.6 or later).

    bfloat16 comes as `ml_dtypes.bfloat16`. Arrays may be read-only.

    Raises:
      ValueError: not such a file, cut off, damaged, or asking for anything but tensors.
    """
    return {name: stored.read() for name, stored in find(path).items()}


def find(path: str | Path) -> dict[str, Stored]:
    """Finds the tensors of such a file; their bytes are read, and checked, one by one.

    Raises:
      ValueError: as `read`; damaged bytes of a tensor when it is read.
    """
    path = Path(path)
    try:
        archive = zipfile.ZipFile(path)  # stays open for the reads to come
        state, files = _load(archive, path.stat().st_size)
        if not isinstance(state, dict):
            raise ValueError(
                f"it holds a {type(state).__name__}, not a dict of tensors"
            )
        other = [name for name, value in state.items() if type(value) is not _Tensor]
        if other:
            names = ", ".join(sorted(name[:60] for name in other[:8]))
            raise ValueError(
                f"it holds {len(other)} entries that are no tensors: {names}"
            )
        return _stored(archive, path, state, files)
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"{path} is not a torch zip file ({error}); if it is complete it may be of "
            f"the format before torch 1.6: load and save it again with a newer torch"
        ) from error
    except Exception as error:  # zip files fail in too many ways to list
        if isinstance(error, OSError) and error.filename:
            raise  # not the file's content
        reason = error if type(error) is ValueError else repr(error)
        raise ValueError(f"{path} cannot be read as torch weights: {reason}") from error


def _load(archive: zipfile.ZipFile, file_size: int) -> tuple[Any, dict[str, Any]]:
    """Returns what the pickle says, and the zip's entry of each storage key."""
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
    state = _unpickle(archive.read(pickles[0]))
    folder = root + "data/"
    files = {n.removeprefix(folder): e for n, e in entries.items() if folder in n}
    return state, files


class _Mark(NamedTuple):
    """The place on the stack where the items of a tuple or dict begin."""


class _Name(NamedTuple):
    module: str
    name: str


class _Storage(NamedTuple):
    kind: str
    key: str
    count: int


class _Tensor(NamedTuple):
    storage: Any
    offset: Any
    shape: Any
    strides: Any


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_MAKERS = {"EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "MARK": _Mark}
_LITERALS = frozenset(
    "BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE".split()
)
_SIZED_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _unpickle(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def pop_to_mark() -> list[Any]:
        at = len(stack) - 1
        while type(stack[at]) is not _Mark:
            at -= 1
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def set_items(items: list[Any]) -> None:
        keys, values = items[::2], items[1::2]
        if not all(type(key) is str for key in keys):
            raise ValueError("entries that are no tensors: their names are no text")
        stack[-1].update(zip(keys, values, strict=True))

    n_made = 0
    for operation, argument, _ in pickletools.genops(data):
        name = operation.name
        n_made += name in _MAKERS or name.startswith("TUPLE") or name == "REDUCE"
        # One byte can make an object of 64; torch needs six or more for each.
        if n_made > len(data) // 6 + 100:
            raise ValueError("a pickle of nothing but containers")
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _MAKERS:
            stack.append(_MAKERS[name]())
        elif name in _SIZED_TUPLES:
            n = _SIZED_TUPLES[name]
            stack[-n:] = [tuple(stack[-n:])]
        elif name == "TUPLE":
            stack.append(tuple(pop_to_mark()))
        elif name == "SETITEM":
            items = stack[-2:]
            del stack[-2:]
            set_items(items)
        elif name == "SETITEMS":
            set_items(pop_to_mark())
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]  # type: ignore[index]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])  # type: ignore[index]
        elif name == "GLOBAL":
            stack.append(_checked(*str(argument).split(" ", 1)))
        elif name == "STACK_GLOBAL":
            stack[-2:] = [_checked(*stack[-2:])]
        elif name == "BINPERSID":
            stack.append(_claimed(stack.pop()))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(_called(stack.pop(), arguments))
        elif name == "BUILD":
            stack.pop()  # attributes of an OrderedDict, such as torch's `_metadata`
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"pickle operation {name} is not allowed")
    return stack[-1]


_DICT = _Name("collections", "OrderedDict")
_REBUILD = _Name("torch._utils", "_rebuild_tensor_v2")


def _checked(module: Any, name: Any) -> _Name:
    known = (module, name) in (_DICT, _REBUILD)
    if not known and not (
        module == "torch" and type(name) is str and name in _STORAGES
    ):
        raise ValueError(
            f"it names {module!s:.60}.{name!s:.60}, which weights do not need"
        )
    return _Name(module, name)


def _called(function: Any, arguments: Any) -> Any:
    if function == _DICT and arguments == ():
        return {}
    if function == _REBUILD and type(arguments) is tuple and len(arguments) >= 4:
        return _Tensor(*arguments[:4])
    raise ValueError("a call that weights do not need")


def _claimed(pid: Any) -> _Storage:
    if not (type(pid) is tuple and len(pid) == 5 and pid[0] == "storage"):
        raise ValueError("unknown kind of storage")
    _, kind, key, _, count = pid
    if type(kind) is not _Name or type(key) is not str or not _is_size(count):
        raise ValueError("unknown type of storage")
    return _Storage(kind.name, key, count)


def _stored(
    archive: zipfile.ZipFile,
    path: Path,
    state: dict[str, _Tensor],
    files: dict[str, zipfile.ZipInfo],
) -> dict[str, Stored]:
    total, cost, last = 0, 0, None
    for name, claim in state.items():
        _check(name, claim, files)
        total += math.prod(claim.shape) * _STORAGES[claim.storage.kind].itemsize
        cost += files[claim.storage.key].file_size if claim.storage.key != last else 0
        last = claim.storage.key
    # Tensors may share a storage, as a tied head does. A thousand views of one make more
    # numbers than the file holds, or are read for ever.
    if max(total, cost) > 4 * path.stat().st_size:
        raise ValueError(
            f"its tensors have {max(total, cost)} bytes, far more than the file"
        )

    @functools.lru_cache(maxsize=1)  # views of one storage follow each other
    def storage(key: str) -> bytes:
        return archive.read(files[key])

    def reader(claim: _Tensor) -> np.ndarray:
        try:
            return _cut(storage(claim.storage.key), claim)
        except (zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
            raise ValueError(f"{path} is damaged: {error}; fetch it again") from error

    return {
        name: Stored(
            claim.shape,
            lambda claim=claim: reader(claim),
            is_float=_STORAGES[claim.storage.kind].kind not in "iub",
        )
        for name, claim in state.items()
    }


def _check(name: str, claim: _Tensor, files: dict[str, zipfile.ZipInfo]) -> None:
    storage, offset, shape, strides = claim
    if type(storage) is not _Storage:
        raise ValueError(f"{name:.60} is a tensor without a storage")
    dtype, info = _STORAGES[storage.kind], files.get(storage.key)
    if info is None:
        raise ValueError(f"storage {storage.key!r:.60} is missing")
    if info.file_size != storage.count * dtype.itemsize:
        raise ValueError(
            f"storage {storage.key!r:.60} has {info.file_size} bytes, not the "
            f"{storage.count} numbers of type {dtype} that the pickle claims"
        )
    if type(shape) is not tuple or type(strides) is not tuple:
        raise ValueError(f"{name:.60} is a tensor without shape or strides")
    if len(shape) != len(strides) or not all(map(_is_size, (offset, *shape, *strides))):
        raise ValueError(f"shape, strides and offset of {name:.60} do not go together")
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    # The last test refuses stride 0, which makes any size out of one number.
    beyond = last >= storage.count or math.prod(shape) > storage.count
    if 0 not in shape and beyond:
        raise ValueError(f"{name:.60} of shape {shape} reaches beyond its storage")


def _cut(data: bytes, claim: _Tensor) -> np.ndarray:
    """Cuts a tensor out of its storage; offset and strides count numbers, not bytes."""
    dtype = _STORAGES[claim.storage.kind]
    raw = np.frombuffer(data, np.uint8)
    storage = raw != 0 if dtype == np.bool_ else raw.view(dtype)
    if 0 in claim.shape:
        return np.zeros(claim.shape, dtype)
    view = np.lib.stride_tricks.as_strided(
        storage[claim.offset :],
        claim.shape,
        tuple(s * dtype.itemsize for s in claim.strides),
        writeable=False,
    )
    return view if view.flags.c_contiguous else view.copy()


def _is_size(n: Any) -> bool:
    return type(n) is int and 0 <= n < 1 << 48

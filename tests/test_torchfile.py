"""`torchfile`: what torch wrote is read bit by bit, and nothing else is let in."""

import io
import os
import pickle
import resource
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from eagle_jax import torchfile

GOLDEN = Path(__file__).parent / "golden"
BINS = sorted(GOLDEN.glob("*/head/pytorch_model.bin"))


class Global:
    """Pickles as a bare name, `module.name`, without importing it."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class Call:
    """Pickles as a call of a Global."""

    def __init__(self, function: Global, *arguments: object) -> None:
        self.function, self.arguments = function, arguments


class Storage:
    def __init__(self, kind: str, key: str, count: object) -> None:
        self.kind, self.key, self.count = kind, key, count


Pickler: Any = pickle._Pickler  # type: ignore[attr-defined]


class Writer(Pickler):
    """Writes what torch.save writes, and what it never would."""

    dispatch: ClassVar[dict[Any, Any]] = dict(Pickler.dispatch)

    def persistent_id(self, obj: object) -> object:
        if isinstance(obj, Storage):
            return ("storage", Global("torch", obj.kind), obj.key, "cpu", obj.count)
        return None

    def save_global_object(self, obj: Global) -> None:
        self.write(f"c{obj.module}\n{obj.name}\n".encode())

    def save_call(self, obj: Call) -> None:
        self.save(obj.function)
        self.save(obj.arguments)
        self.write(b"R")

    dispatch[Global] = save_global_object
    dispatch[Call] = save_call


REBUILD = Global("torch._utils", "_rebuild_tensor_v2")


def tensor(storage: object, offset: object, shape: object, strides: object) -> Call:
    hooks = Call(Global("collections", "OrderedDict"))
    return Call(REBUILD, storage, offset, shape, strides, False, hooks)


def write(
    path: Path, state: object, data: dict[str, bytes], compression: int = 0
) -> Path:
    stream = io.BytesIO()
    Writer(stream, 2).dump(state)
    return write_raw(path, stream.getvalue(), data, compression)


def write_raw(
    path: Path, raw: bytes, data: dict[str, bytes], compression: int = 0
) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("m/data.pkl", raw)
        archive.writestr("m/byteorder", "little")
        for key, content in data.items():
            archive.writestr(f"m/data/{key}", content)
    return path


@pytest.mark.parametrize("file", BINS, ids=lambda p: p.parent.parent.name)
def test_official_files_equal_their_safetensors_twins(file: Path) -> None:
    read = torchfile.read(file)
    twin = safetensors.numpy.load_file(file.parent / "model.safetensors")
    assert read.keys() == twin.keys()
    for name, array in twin.items():
        assert read[name].dtype == array.dtype
        assert read[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("FloatStorage", np.float32),
        ("HalfStorage", np.float16),
        ("BFloat16Storage", ml_dtypes.bfloat16),
        ("LongStorage", np.int64),
        ("BoolStorage", np.bool_),
    ],
)
def test_every_type_is_read_with_its_own_bits(
    tmp_path: Path, kind: str, dtype: type
) -> None:
    array = (np.arange(6) % 2 if dtype is np.bool_ else np.arange(6)).astype(dtype)
    state = {"x": tensor(Storage(kind, "0", 6), 0, (2, 3), (3, 1))}
    path = write(tmp_path / "a.bin", state, {"0": array.tobytes()})
    read = torchfile.read(path)["x"]
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, array.reshape(2, 3))


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "expected"),
    [
        (0, (2, 3), (1, 2), [[0, 2, 4], [1, 3, 5]]),
        (2, (2,), (3,), [2, 5]),
        (1, (2, 2), (2, 1), [[1, 2], [3, 4]]),
        (5, (), (), 5),
        (0, (0, 4), (4, 1), np.zeros((0, 4))),
    ],
)
def test_offsets_and_strides_count_numbers(
    tmp_path: Path, offset: int, shape: tuple, strides: tuple, expected: object
) -> None:
    state = {"x": tensor(Storage("FloatStorage", "0", 6), offset, shape, strides)}
    data = np.arange(6, dtype=np.float32).tobytes()
    read = torchfile.read(write(tmp_path / "a.bin", state, {"0": data}))["x"]
    assert read.shape == shape and read.flags.c_contiguous
    np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize(
    "function",
    [
        Global("os", "system"),
        Global("posix", "system"),
        Global("builtins", "eval"),
        Global("builtins", "getattr"),
        Global("torch", "load"),
        Global("torch._utils", "_rebuild_parameter"),
        Global("collections", "OrderedDict.fromkeys"),
    ],
    ids=lambda g: f"{g.module}.{g.name}",
)
def test_a_pickle_that_names_other_functions_is_refused_unrun(
    tmp_path: Path, function: Global
) -> None:
    mark = tmp_path / "ran"
    path = write(tmp_path / "a.bin", {"x": Call(function, f"touch {mark}")}, {})
    with pytest.raises(ValueError, match="which weights do not need"):
        torchfile.read(path)
    assert not mark.exists()


def test_a_reduced_object_is_refused_unrun(tmp_path: Path) -> None:
    mark = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple:
            return os.system, (f"touch {mark}",)

    for protocol in range(2, 6):
        raw = pickle.dumps({"x": Evil()}, protocol)
        with pytest.raises(ValueError, match=r"a\.bin cannot be read"):
            torchfile.read(write_raw(tmp_path / "a.bin", raw, {}))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"\x80\x02(ctorch\nFloatStorage\nS'ls'\no.", "is not allowed"),
        (b"(S'ls'\nios\nsystem\n.", "is not allowed"),
        (b"\x80\x02}(X\x01\x00\x00\x00aNK\x01Nu.", "their names are no text"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f.", "cannot be read"),
        (b"\x80\x02X\xff\xff\xff\x7fab.", "cannot be read"),
        (b"\x80\x02]q\x00.", "EMPTY_LIST is not allowed"),
        (b"\x80\x02)q\x00.", "holds a tuple"),
        (b"\x80\x02}q\x00X\x01\x00\x00\x00aK\x01s.", "1 entries that are no tensors"),
    ],
)
def test_operations_beyond_a_state_dict_are_refused(
    tmp_path: Path, raw: bytes, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        torchfile.read(write_raw(tmp_path / "a.bin", raw, {}))


def test_a_memo_index_claims_no_memory(tmp_path: Path) -> None:
    raw = b"\x80\x02}r\xff\xff\xff\x7f."
    assert torchfile.read(write_raw(tmp_path / "a.bin", raw, {})) == {}


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        # Python's own unpickler dies of the first one: hashing a tuple recurses.
        (b"\x80\x02}N" + b"\x85" * 1_000_000 + b"Ns.", "nothing but containers"),
        (b"\x80\x02}" + b"X\x06\x00\x00\x00longer)" * 9 + b"Ns.", "no text"),
        (b"\x80\x02" + b"}" * 1_000_000 + b".", "nothing but containers"),
    ],
    ids=["tuples", "pairs", "dicts"],
)
def test_nested_containers_are_refused(tmp_path: Path, raw: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        torchfile.read(write_raw(tmp_path / "a.bin", raw, {}))


def test_many_views_of_one_storage_are_refused(tmp_path: Path) -> None:
    storage = Storage("FloatStorage", "0", 1 << 16)
    turned = tensor(storage, 0, (256, 256), (1, 256))
    state = {str(i): turned for i in range(40)}
    path = write(tmp_path / "a.bin", state, {"0": bytes(4 << 16)})
    with pytest.raises(ValueError, match="far more than the file"):
        torchfile.read(path)
    # Small views that make every read fetch another storage again.
    stores = [Storage("FloatStorage", str(i), 1 << 16) for i in range(2)]
    state = {str(i): tensor(stores[i % 2], i, (1,), (1,)) for i in range(40)}
    data = {"0": bytes(4 << 16), "1": bytes(4 << 16)}
    with pytest.raises(ValueError, match="far more than the file"):
        torchfile.read(write(tmp_path / "a.bin", state, data))
    path = write(tmp_path / "a.bin", {"a": turned, "b": turned}, {"0": bytes(4 << 16)})
    assert torchfile.read(path).keys() == {"a", "b"}


HUGE = 1 << 40


@pytest.mark.parametrize(
    "claim",
    [
        (Storage("FloatStorage", "0", HUGE), 0, (HUGE,), (1,)),
        (Storage("FloatStorage", "0", 4), 0, (HUGE,), (1,)),
        (Storage("FloatStorage", "0", 4), 0, (HUGE, HUGE), (0, 0)),
        (Storage("FloatStorage", "0", 8), 0, (4,), (1,)),
        (Storage("FloatStorage", "0", 4), 0, (1 << 26,), (0,)),
        (Storage("FloatStorage", "0", 4), HUGE, (1,), (1,)),
        (Storage("FloatStorage", "0", 4), 0, (4,), (HUGE,)),
        (Storage("FloatStorage", "0", 4), -1, (4,), (1,)),
        (Storage("FloatStorage", "0", 4), 0, (-4,), (1,)),
        (Storage("FloatStorage", "0", 4), 0, (2, 2), (1,)),
        (Storage("FloatStorage", "1", 4), 0, (4,), (1,)),
        (Storage("FloatStorage", "0", True), 0, (4,), (1,)),
        (Storage("FloatStorage", "0", 4.0), 0, (4,), (1,)),
        (Storage("ListStorage", "0", 4), 0, (4,), (1,)),
        ("no storage", 0, (4,), (1,)),
        (tensor(Storage("FloatStorage", "0", 4), 0, (2, 2), (2, 1)), 1, (4,), (1,)),
    ],
)
def test_impossible_sizes_are_refused_without_memory(
    tmp_path: Path, claim: tuple
) -> None:
    path = write(tmp_path / "a.bin", {"x": tensor(*claim)}, {"0": bytes(16)})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"a\.bin cannot be read"):
        torchfile.read(path)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 64 << 10  # KiB


def test_a_packed_storage_is_refused(tmp_path: Path) -> None:
    size = 1 << 22
    state = {"x": tensor(Storage("FloatStorage", "0", size), 0, (size,), (1,))}
    data = {"0": bytes(4 * size)}
    path = write(tmp_path / "a.bin", state, data, zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="compressed"):
        torchfile.read(path)


def test_a_pickle_cannot_change_what_the_next_file_meets(tmp_path: Path) -> None:
    state = b"}(X\x08\x00\x00\x00__call__K\x01u"
    for name in (b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n"):
        raw = b"\x80\x02" + name + b"N" + state + b"\x86b."
        with pytest.raises(ValueError):
            torchfile.read(write_raw(tmp_path / "a.bin", raw, {}))
    assert torchfile.read(BINS[0])


def test_cut_files_give_value_errors(tmp_path: Path) -> None:
    whole = BINS[0].read_bytes()
    for size in [*range(0, len(whole), 1777), len(whole) - 1]:
        (tmp_path / "a.bin").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"a\.bin"):
            torchfile.read(tmp_path / "a.bin")


def test_flipped_bytes_give_value_errors_or_the_same_names(tmp_path: Path) -> None:
    whole = bytearray(BINS[0].read_bytes())
    names = torchfile.read(BINS[0]).keys()
    generator, wrong = np.random.default_rng(0), 0
    for _ in range(150):
        copy = whole.copy()
        copy[generator.integers(len(copy))] ^= 1 << generator.integers(8)
        (tmp_path / "a.bin").write_bytes(copy)
        try:
            assert torchfile.read(tmp_path / "a.bin").keys() == names
        except ValueError:
            wrong += 1
    assert wrong > 100


def test_the_format_before_the_zip_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(pickle.dumps(119547037146038801333356, 2))
    with pytest.raises(ValueError, match=r"before torch 1\.6"):
        torchfile.read(tmp_path / "a.bin")

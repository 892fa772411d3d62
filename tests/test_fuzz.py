"""Damaged and hostile files: a loader loads them or says what is wrong, nothing else.

Every case is named by its loader and number, so a failure can be run again alone. The
long form: EAGLE_JAX_FUZZ=10000 python -m pytest tests/test_fuzz.py -k damaged -s
"""

import contextlib
import gzip
import io
import json
import os
import random
import resource
import shutil
import signal
import string
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import drivers
import gguf
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import test_torchfile
import test_weights
import tiny
from tokenizers import Tokenizer, models, pre_tokenizers

from eagle_jax import checkpoint, data, heads, weights
from eagle_jax import template as template_lib
from eagle_jax import text as text_lib
from experiments import writer

N_CASES = int(os.environ.get("EAGLE_JAX_FUZZ", "150"))
FIRST = int(os.environ.get("EAGLE_JAX_FUZZ_FIRST", "0"))
SECONDS = 10  # of computing, for one case
ROOM = 512 << 20  # new memory while loading files of some kilobytes
GOLDEN = Path(__file__).parent / "golden"


class Hang(BaseException):
    """Not an Exception, so that no loader takes it for a fault of its file."""


def _hang(*_: object) -> None:
    raise Hang


@contextlib.contextmanager
def bounds(seconds: float = SECONDS, room: int = ROOM) -> Iterator[None]:
    """Makes a hang raise `Hang`, and a big allocation MemoryError.

    Seconds are of this process's computing, so that a busy machine makes no hang. Not by
    SIGPROF, which libtpu sends itself once it is loaded.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGVTALRM, _hang)
    resource.setrlimit(resource.RLIMIT_AS, (used + room, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


INTS = (0, 1, 2, 7, 255, 1 << 15, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40)
INTS += ((1 << 63) - 1, 1 << 63, (1 << 64) - 1)
VALUES = (None, True, -1, *INTS, 10**30, 0.5, -0.5, 1e-300, 1e308, float("nan"))
VALUES += (float("inf"), "", "x", "x" * 3000, "\ud800", "\0", "../../x", [], {}, [[]])
VALUES += ({"a": 1}, [1, 2], ["a"], nested(60))


def damage_bytes(r: random.Random, content: bytes) -> bytes:
    """Cuts, flips, overwrites, drops, doubles or inserts bytes, mostly near the front."""
    raw = bytearray(content)
    for _ in range(r.choice((1, 1, 1, 2, 5))):
        end = len(raw) if r.random() < 0.4 else min(len(raw), 4096)
        at, n = r.randrange(end + 1), r.choice((1, 2, 4, 8, 8, 40))
        way = r.randrange(7)
        if way == 0:
            del raw[at:]
        elif way == 1 and at < len(raw):
            raw[at] ^= 1 << r.randrange(8)
        elif way == 2:
            size = r.choice((1, 2, 4, 8))
            number = (r.choice(INTS) + r.choice((-1, 0, 0, 1))) % (1 << 8 * size)
            raw[at : at + size] = number.to_bytes(size, "little")
        elif way == 3:
            del raw[at : at + n]
        elif way == 4:
            raw[at:at] = raw[at : at + n]
        elif way == 5:
            raw[at:at] = r.randbytes(n)
        else:
            other = r.randrange(len(raw) + 1)
            raw[at : at + n] = raw[other : other + n]
    return bytes(raw)


def _places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    yield path
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _places(inner, (*path, key))


def damage_tree(r: random.Random, tree: Any) -> Any:
    """Replaces, drops or doubles values anywhere in parsed JSON."""
    for _ in range(r.choice((1, 1, 2, 4))):
        path = r.choice(list(_places(tree)))
        if not path:
            if r.random() < 0.1:
                return r.choice(VALUES)
            continue
        parent = tree
        for key in path[:-1]:
            parent = parent[key]
        way, key = r.randrange(6), path[-1]
        if way == 0:
            del parent[key]
        elif way == 1 and isinstance(parent, dict):
            parent[r.choice(string.ascii_letters)] = parent.pop(key)
        elif way == 2 and type(parent[key]) is int:
            parent[key] += r.choice((-1, 1, 1000))
        else:
            parent[key] = json.loads(json.dumps(r.choice(VALUES)))
    return tree


def damage_json(r: random.Random, content: bytes) -> bytes:
    if r.random() < 0.25:
        return damage_bytes(r, content)
    return json.dumps(damage_tree(r, json.loads(content))).encode()


def damage_jsonl(r: random.Random, content: bytes) -> bytes:
    lines = content.split(b"\n")
    i = r.randrange(len(lines) - 1)
    lines[i] = damage_json(r, lines[i])
    return b"\n".join(lines)


def damage_gz(r: random.Random, content: bytes) -> bytes:
    if r.random() < 0.5:
        return damage_bytes(r, content)
    return gzip.compress(damage_json(r, gzip.decompress(content)))


def damage_safetensors(r: random.Random, content: bytes) -> bytes:
    if r.random() < 0.4:
        return damage_bytes(r, content)
    (n,) = struct.unpack_from("<Q", content)
    header = damage_json(r, content[8 : 8 + n])
    return struct.pack("<Q", len(header)) + header + content[8 + n :]


def damage_torch(r: random.Random, content: bytes) -> bytes:
    if r.random() < 0.3:
        return damage_bytes(r, content)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
        victim = r.choice(old.namelist() + ["archive/data.pkl"] * 20)
        for name in old.namelist():
            raw = old.read(name)
            if name == victim or (name.endswith("data.pkl") and "data.pkl" in victim):
                raw = damage_bytes(r, raw)
                if r.random() < 0.1:
                    continue
            packing = zipfile.ZIP_DEFLATED if r.random() < 1e-3 else zipfile.ZIP_STORED
            new.writestr(name, raw, packing)
    return out.getvalue()


def damage_template(r: random.Random, content: bytes) -> bytes:
    if r.random() < 0.5:
        return damage_bytes(r, content)
    parts = [b"{{", b"}}", b"{%", b"%}", b"messages", b"[0]", b"|", b"(", b")", b"'"]
    parts += [b" for m in messages ", b" endfor ", b" if 1 ", b" set x = ", b"|tojson"]
    parts += [b" macro f() ", b" endmacro ", b"f()", b"{#", b"-%}", b"~", b"*", b"10"]
    at = r.randrange(len(content))
    new = b"".join(r.choices(parts, k=r.randrange(1, 8)))
    return content[:at] + new + content[at + r.randrange(9) :]


DAMAGE = {
    ".gguf": damage_bytes,
    ".safetensors": damage_safetensors,
    ".bin": damage_torch,
    ".json": damage_json,
    ".jsonl": damage_jsonl,
    ".txt": damage_bytes,
    ".gz": damage_gz,
    ".jinja": damage_template,
}


class Loader(NamedTuple):
    """Writes good files into an empty folder, and reads them again."""

    make: Callable[[Path], object]
    load: Callable[[Path], object]


CFG = test_weights.CFG
CHAT = "{% for m in messages %}<s>{{ m.role }}\n{{ m['content'] | trim }}</s>\n"
CHAT += "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
TALK = [
    {"role": "user", "content": "Hi you"},
    {"role": "assistant", "content": "Hello"},
]


def numbers() -> Any:
    return tiny.params(0, CFG)["target"]


def make_gguf(folder: Path) -> None:
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_context_length(2048)
    writer.add_block_count(CFG.n_layers)
    writer.add_embedding_length(CFG.d_model)
    writer.add_feed_forward_length(CFG.d_mlp)
    writer.add_head_count(CFG.n_heads)
    writer.add_head_count_kv(CFG.n_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<s>", "</s>", *"abcdefghijklmnopqrstuvwxyzHĠĊ", "he", "ll"])
    writer.add_token_types([3, 3, *[1] * 31])
    writer.add_token_merges(["h e", "l l"])
    writer.add_chat_template(CHAT)
    kinds = [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0, None]
    for i, (name, x) in enumerate(test_weights.llama_gguf_tensors(numbers()).items()):
        kind = kinds[i % 3]
        if x.ndim == 2 and kind is not None:
            writer.add_tensor(name, gguf.quantize(x, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_gguf(folder: Path) -> None:
    weights.load_target(folder / "tiny.gguf")
    text_lib.load_text(folder / "tiny.gguf")


ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def make_folder(folder: Path) -> None:
    tensors = test_weights.named_tensors(numbers(), "hf")
    config = test_weights.hf_config(rope_scaling=ROPE, head_dim=8)
    test_weights.write_folder(folder, tensors, config, 2)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')


def make_torch_folder(folder: Path) -> None:
    tensors = test_weights.named_tensors(numbers(), "hf")
    config = test_weights.hf_config(model_type="mistral", sliding_window=64)
    (folder / "config.json").write_text(json.dumps(config))
    write_torch(folder / "pytorch_model.bin", tensors)


def write_torch(file: Path, tensors: dict[str, np.ndarray]) -> None:
    state, stored = {}, {}
    for i, (name, x) in enumerate(tensors.items()):
        storage = test_torchfile.Storage("FloatStorage", str(i), x.size)
        strides = tuple(n // x.itemsize for n in x.strides)
        state[name] = test_torchfile.tensor(storage, 0, x.shape, strides)
        stored[str(i)] = x.tobytes()
    test_torchfile.write(file, state, stored)


def make_head(name: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        head = GOLDEN / "e3_gqa_reduced_vocab" / "head"
        shutil.copy(head / "config.json", folder)
        shutil.copy(head / name, folder)

    return make


def make_own_head(folder: Path) -> None:
    cfg = tiny.draft_config(CFG, "small", n_layers=2, vocab_size=20)
    params = tiny.params(0, CFG, cfg)["draft"]
    heads.save_head(folder, cfg, params, None, "own", meta={}, target=CFG)


def load_head(folder: Path) -> None:
    heads.report(folder)


def rows() -> list[Any]:
    user, answer = TALK
    shared = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]
    return [
        {"messages": TALK},
        {"id": 3, "conversations": shared},
        {"messages": [user, answer, user], "system": "Be brief.", "finished": False},
        {"messages": [{"role": "tool", "content": "x"}, answer]},
    ]


def make_data(folder: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows())
    (folder / "a.json").write_text(json.dumps(rows()))
    (folder / "b.jsonl").write_text(lines)
    (folder / "c.json.gz").write_bytes(gzip.compress(json.dumps(rows()).encode()))


def load_data(folder: Path) -> None:
    for name in ("a.json", "b.jsonl", "c.json.gz"):
        _, report = data.read_conversations(folder / name)
        data.describe(report)


def make_questions(folder: Path) -> None:
    row = {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}
    lines = json.dumps(row) + "\n" + json.dumps(row | {"question_id": "b"}) + "\n"
    (folder / "qa.jsonl").write_text(lines)


def make_prompts(folder: Path) -> None:
    make_questions(folder)
    make_data(folder)
    (folder / "d.txt").write_text("Why is the sky blue?\nName a bird. Ä\n")
    turns = {"question_id": 1, "category": "a", "turns": ["Write."]}
    packed = gzip.compress(json.dumps(turns).encode() + b"\n")
    (folder / "e.jsonl.gz").write_bytes(packed)


def make_text(folder: Path) -> None:
    marks = ["<s>", "</s>"]
    vocab = {c: i for i, c in enumerate([*marks, *pre_tokenizers.ByteLevel.alphabet()])}
    tokenizer = Tokenizer(models.BPE(vocab | {"he": 300, "ll": 301}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(marks)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "model_max": 9}
    config["chat_template"] = [{"name": "default", "template": CHAT}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_template(folder: Path) -> None:
    make_text(folder)
    (folder / "chat_template.jinja").write_text(CHAT)


def load_text(folder: Path) -> None:
    text = text_lib.load_text(folder)
    data.tokenize(text, data.Conversation(TALK, "x:1"))


LOADERS = {
    "gguf": Loader(make_gguf, load_gguf),
    "safetensors": Loader(make_folder, weights.load_target),
    "bin": Loader(make_torch_folder, weights.load_target),
    "head, safetensors": Loader(make_head("model.safetensors"), load_head),
    "head, bin": Loader(make_head("pytorch_model.bin"), load_head),
    "head, own": Loader(make_own_head, load_head),
    "conversations": Loader(make_data, load_data),
    "questions": Loader(make_questions, data.read_questions),
    "prompts": Loader(make_prompts, writer.read_prompts),
    "tokenizer": Loader(make_text, load_text),
    "template": Loader(make_template, load_text),
}
# Files that stay whole while another one is in question.
WHOLE = {"template": ("tokenizer.json", "tokenizer_config.json")}


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(template_lib, "SECONDS", 1.0)


@pytest.mark.parametrize("name", list(LOADERS))
def test_damaged_files_are_loaded_or_refused(name, tmp_path, impatient):
    loader = LOADERS[name]
    loader.make(tmp_path)
    loader.load(tmp_path)
    files = sorted(p for p in tmp_path.iterdir() if p.name not in WHOLE.get(name, ()))
    good = {file: file.read_bytes() for file in files}
    refused, began = 0, time.monotonic()
    for i in range(FIRST, FIRST + N_CASES):
        r = random.Random(f"{name} {i}")
        file = r.choice(files)
        file.write_bytes(DAMAGE[file.suffix](r, good[file]))
        case = f"case {i} of {name}, {file.name}"
        try:
            with bounds():
                loader.load(tmp_path)
        except (ValueError, OSError) as err:
            refused += 1
            # What a template or a tokenizer does later is no fault of one file.
            words = ["the ", "template", "tokenizer"]
            named = words if loader.load is load_text else []
            named = [*named, str(tmp_path)]
            is_clear = any(word in str(err) for word in named)
            assert is_clear, f"{case} gives an unclear message: {err!r}"
        except BaseException as err:
            print(f"{case} ends in {err!r}", flush=True)
            raise AssertionError(f"{case} ends in {type(err).__name__}") from err
        file.write_bytes(good[file])
    seconds = time.monotonic() - began
    print(f"\n{name}: {N_CASES} cases, {refused} refused, {seconds:.0f} s", flush=True)
    # Damage that is never noticed, or always, would test nothing.
    assert 0.2 * N_CASES < refused < N_CASES


def try_damaged_kept_targets(folder: Path) -> None:
    """A changed number is still a number: orbax keeps no checksum of arrays."""
    params = numbers()
    kept = folder / "kept"
    checkpoint.save_params(kept, params)
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, params)
    files = sorted(p for p in kept.rglob("*") if p.is_file())
    refused, n_cases = 0, N_CASES // 5
    for i in range(FIRST // 5, FIRST // 5 + n_cases):
        r = random.Random(f"kept {i}")
        file = r.choice(files)
        good = file.read_bytes()
        file.write_bytes(damage_bytes(r, good))
        try:
            got = checkpoint.restore_params(kept, like)
        except ValueError as err:
            refused += 1
            assert "delete it, and it is made again" in str(err)
        else:
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(params), strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype), (
                    f"case {i}, {file.name}"
                )
        file.write_bytes(good)
    print(f"\nkept target: {n_cases} cases, {refused} refused", flush=True)
    assert 0 < refused < n_cases


def test_damaged_kept_targets_are_refused_or_loaded(tmp_path):
    # In a process of its own: where one array cannot be read, orbax leaves the readers of
    # the others behind, and they complain whenever they are collected.
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(drivers.ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("name", "file", "content", "why"),
    [
        ("safetensors", "config.json", b'{"a":' + DEEP, "nested too deeply"),
        ("safetensors", "generation_config.json", DEEP, "nested too deeply"),
        ("safetensors", "model.safetensors.index.json", DEEP, "nested too deeply"),
        ("head, bin", "config.json", DEEP, "nested too deeply"),
        ("conversations", "a.json", DEEP, "nested too deeply"),
        ("conversations", "b.jsonl", DEEP + b"\n" + DEEP, "2  skipped: malformed JSON"),
        ("conversations", "c.json.gz", gzip.compress(DEEP), "nested too deeply"),
        ("questions", "qa.jsonl", DEEP, "nested too deeply"),
        ("tokenizer", "tokenizer_config.json", DEEP, "nested too deeply"),
        ("tokenizer", "tokenizer.json", DEEP, "is damaged or too new"),
        ("tokenizer", "tokenizer.json", b"\xff\xfe", "is damaged or too new"),
        (
            "tokenizer",
            "tokenizer.json",
            b'{"model": {"type": "BPE", "vocab": {"a": 2147483648}, "merges": []}}',
            "it has a token of id 2147483648",
        ),
        ("template", "chat_template.jinja", b"\xff\xfe{", "is no text"),
        ("conversations", "a.json", b'[{"messages": "\xff"}]', "a.json cannot be read"),
        (
            "safetensors",
            "model.safetensors.index.json",
            b'{"weight_map": {"lm_head.weight": "../../secret.safetensors"}}',
            "no weight_map from tensor to file names",
        ),
        (
            "safetensors",
            "config.json",
            json.dumps(
                test_weights.hf_config(num_hidden_layers=(1 << 31) - 1)
            ).encode(),
            "29 tensors are no 2147483647 layers",
        ),
        (
            "safetensors",
            "model-00001-of-00002.safetensors",
            struct.pack("<Q", 1 << 62) + b"{}",
            "a header of 4611686018427387904 bytes",
        ),
    ],
)
def test_hostile_files_are_refused(name, file, content, why, tmp_path):
    LOADERS[name].make(tmp_path)
    (tmp_path / file).write_bytes(content)
    with bounds(), pytest.raises(ValueError, match=why):
        LOADERS[name].load(tmp_path)


def test_a_gz_bomb_is_refused(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\n" * (80 << 20), 1))
    with bounds(), pytest.raises(ValueError, match="unpacks to more than 67108864"):
        data.read_conversations(tmp_path / "a.jsonl.gz")


def field(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    raw = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
    return raw + struct.pack(f"<{len(shape)}QIQ", *shape, kind, offset)


@pytest.mark.parametrize(
    ("n_tensors", "n_fields", "body", "why"),
    [
        (1 << 60, 0, b"", "cut off or damaged"),
        (0, 1 << 60, b"", "cut off or damaged"),
        (0, 1, struct.pack("<Q", 1 << 63), "cut off or damaged"),
        (0, 1, field("a", 8, struct.pack("<Q", 1 << 40)), "cut off or damaged"),
        (0, 1, field("a", 9, struct.pack("<IQ", 0, 1 << 62)), "cut off or damaged"),
        (0, 1, field("a", 9, struct.pack("<IQ", 9, 1) * 100_000), "cut off or damaged"),
        (0, 1, field("a", 8, struct.pack("<Q", 2) + b"\xff\xfe"), "damaged"),
        (0, 1, field("general.alignment", 4, bytes(4)), "general.alignment=0"),
        (1, 0, tensor("x", (1 << 32, 1 << 32), 0, 0), "asks for 73786976294838206"),
        (1, 0, tensor("x", (1 << 40, 0), 0, 0), "is empty"),
        (1, 0, tensor("x", (), 0, 0), "is empty"),
        (1, 0, tensor("x", (4,), 99, 0), "unknown type"),
        (1, 0, tensor("x", (33,), 2, 0), "not a multiple"),
        (2, 0, tensor("x", (8,), 0, 0) + tensor("y", (8,), 0, 0), "overlap"),
    ],
)
def test_hostile_gguf_headers_are_refused(n_tensors, n_fields, body, why, tmp_path):
    raw = b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_fields) + body
    raw += bytes(-len(raw) % 32 + 32)
    (tmp_path / "a.gguf").write_bytes(raw)
    with bounds(), pytest.raises(ValueError, match=why):
        weights.load_target(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"draft_vocab_size": (1 << 31) - 1}, "misshaped: lm_head.weight"),
        ({"vocab_size": (1 << 31) - 1}, r"misshaped: t2d is .*2147483647"),
        ({"draft_vocab_size": 1 << 70}, "integer draft_vocab_size"),
        ({"rope_theta": 10**400}, "too large"),
        ({"architectures": 3}, "not iterable"),
    ],
)
def test_hostile_head_configs_are_refused(change, why, tmp_path):
    make_head("model.safetensors")(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with bounds(), pytest.raises(ValueError, match=why):
        heads.load_head(tmp_path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"n_layers": 1 << 30}, "15 tensors are no 1073741824 layers"),
        ({"d_model": 1 << 40}, "d_model=1099511627776 is no size"),
        ({"d_mlp": "64"}, "d_mlp='64' is no int"),
        ({"n_kv_heads": 0}, "multiple of n_kv_heads"),
        ({"head": ["small"]}, "is no str"),
        ({"rope_scaling": {"kind": "linear"}}, "factor"),
        ({"made_up": 1}, "made_up"),
    ],
)
def test_hostile_configs_of_own_heads_are_refused(change, why, tmp_path):
    make_own_head(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["eagle_jax"]["draft"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with bounds(), pytest.raises(ValueError, match=why):
        heads.load_head(tmp_path)


def test_a_head_of_empty_tensors_is_refused(tmp_path):
    make_head("model.safetensors")(tmp_path)
    empty = {"dtype": "F32", "shape": [0, 1 << 50], "data_offsets": [0, 0]}
    header = json.dumps({"fc.weight": empty, "midlayer.x": empty}).encode()
    raw = struct.pack("<Q", len(header)) + header
    (tmp_path / "model.safetensors").write_bytes(raw)
    with bounds(), pytest.raises(ValueError, match="times the target's width"):
        heads.load_head(tmp_path)


GREEDY = "the chat template takes more than 0.2 seconds or 512 MiB"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% for i in 'x' * 999 %}" * 9 + "{% endfor %}" * 9, GREEDY),
        ("{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(9) }}", "recu"),
        ("{{ 10 ** (10 ** 8) }}", GREEDY),
        ("{{ 'a' * 10 ** 10 }}", "MemoryError"),
        ("{{ 'a' | center(10 ** 10) }}", "refuses these messages"),
        ("{{ messages[0].content * 10 ** 7 }}", "writes more than"),
        ("{% set n = namespace(s='aa') %}{% for i in range(60) %}"
         "{% set n.s = n.s ~ n.s %}{% endfor %}", f"MemoryError|{GREEDY}"),
        ("{{" + "(" * 5000, "refuses these messages"),
        ("{{ cycler.__init__.__globals__.os.system('touch MARK') }}", "is unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "is unsafe"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{% include '/etc/hostname' %}", "refuses these messages"),
    ],
)  # fmt: skip
def test_hostile_templates_are_refused(template, why, tmp_path, monkeypatch):
    monkeypatch.setattr(template_lib, "SECONDS", 0.2)
    template = template.replace("MARK", str(tmp_path / "ran"))
    with bounds(), pytest.raises(ValueError, match=why):
        template_lib.render(template, {"messages": TALK})
    assert not (tmp_path / "ran").exists()
    assert template_lib.render(CHAT, {"messages": TALK[:1]}) == "<s>user\nHi you</s>\n"


IGNORING = """
import signal
from eagle_jax import template
signal.signal(signal.SIGPROF, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])
template.SECONDS = 0.2
template.render("{{ 10 ** (10 ** 8) }}", {})
"""


def test_the_limit_on_time_holds_where_its_signal_is_ignored():
    # As libtpu leaves it: ignored in the process, and so at first in one it starts.
    done = subprocess.run(
        [sys.executable, "-c", IGNORING],
        env=os.environ | {"PYTHONPATH": str(drivers.ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert GREEDY in done.stderr


def test_an_interrupted_rendering_does_not_answer_the_next_one(monkeypatch):
    slow = "{% for i in range(99999) %}{% for j in range(99) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(template_lib, "SECONDS", 60.0)
    before = signal.signal(signal.SIGALRM, _hang)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(Hang):
            template_lib.render(slow + "late", {})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert template_lib.render("next", {}) == "next"


if __name__ == "__main__":
    try_damaged_kept_targets(Path(sys.argv[1]))

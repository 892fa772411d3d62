"""What the frozen target says about training conversations, computed or read from disk.

Features do not change while a head is trained, and every variant of a study reads the same
ones. A store on disk computes them once: later epochs and other heads then cost the head's
own arithmetic only.
"""

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eagle_jax import data, sharding, train
from eagle_jax.config import DraftConfig, TargetConfig, fingerprint
from eagle_jax.data import Packed, Sample
from eagle_jax.layers import Params
from eagle_jax.train import Batch, Features
from experiments.common import Progress, Setup, append_line, read_lines

TAPS = DraftConfig(head="eagle3")


def to_batch(packed: Packed, setup: Setup) -> Batch:
    """Brings a packed batch to the devices, its rows where the mesh wants them."""
    batch = Batch(*(jnp.asarray(getattr(packed, name)) for name in Batch._fields))
    return sharding.place(batch, sharding.mesh_of(setup.target_params))


@functools.partial(jax.jit, static_argnames="cfg")
def _raw(params: Params, batch: Batch, cfg: TargetConfig) -> Float[Array, "B T X"]:
    """Taps, final-norm output and next token of every token, side by side."""
    given = train.target_features(params, batch, cfg, TAPS)
    token = digits(train.likeliest(params, given.top)).astype(given.top.dtype)
    return jnp.concatenate([given.read, given.top, token]).transpose(1, 2, 0)


def digits(token: Int[Array, "B T"]) -> Int[Array, "3 B T"]:
    """Writes token ids to base 128: bfloat16 holds whole numbers up to 256 only."""
    return jnp.stack([token // 128**2, token // 128 % 128, token % 128])


@functools.partial(jax.jit, static_argnames=("width", "head"))
def given(
    raw: Float[Array, "B T X"],
    scale: Float[Array, " E"],
    width: int,
    head: DraftConfig,
) -> Features:
    """Picks and scales what a head reads; `width` is the target's."""
    parts = raw[..., :-3].astype(scale.dtype).transpose(2, 0, 1)
    taps, top = parts[:-width], parts[-width:]
    high, middle, low = raw[..., -3:].astype(jnp.int32).transpose(2, 0, 1)
    read = top if head.reads_top else taps
    likeliest = (high * 128 + middle) * 128 + low
    return Features(read / scale[:, None, None], top, likeliest)


class Online:
    """Runs the target over every batch: no disk, but all its time in every epoch."""

    def __init__(self, setup: Setup):
        self.setup = setup

    def raw(self, packed: Packed) -> Float[Any, "B T X"]:
        """Returns the taps and the final-norm output of one batch."""
        setup = self.setup
        return _raw(setup.target_params, to_batch(packed, setup), setup.target_cfg)


class Store:
    """Features of samples in one growing file of float16, found by a sample's tokens.

    A kill loses the newest sample at most: one counts once its line is in the index,
    which is written after its features. Numbers beyond float16 are clipped.
    """

    def __init__(self, setup: Setup, folder: Path):
        t = setup.target_cfg
        self.setup = setup
        self.width = (len(t.taps) + 1) * t.d_model + 3
        parts = setup.target_hash, list(t.taps), setup.cfg.precision, self.width
        name = fingerprint(*parts)
        self.index = folder / f"{name}.jsonl"
        self.path = folder / f"{name}.float16"
        folder.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        stored = self.path.stat().st_size // (2 * self.width)
        lines = [row for row in read_lines(self.index) if _is_entry(row, stored)]
        self.start = {row["sample"]: row["start"] for row in lines}
        self.n_rows = max((row["start"] + row["n"] for row in lines), default=0)
        self.rows = np.zeros((0, self.width), np.float16)
        self.place = np.zeros(0, np.int64)  # stored row of every `Packed.source`

    def add(self, samples: Sequence[Sample]) -> None:
        """Computes what is missing, with progress; then `raw` knows these samples.

        Raises:
          OSError: the disk is full; what was stored stays.
        """
        names = [_name(sample) for sample in samples]
        missing = {n: i for i, n in enumerate(names) if n not in self.start}
        if missing:
            self._compute([samples[i] for i in missing.values()])
        shape = (self.n_rows, self.width)  # a kill may leave part of a row behind
        self.rows = np.memmap(self.path, np.float16, "r", shape=shape)
        self.place = np.full(max(s.start + len(s.tokens) for s in samples), -1)
        for name, sample in zip(names, samples, strict=True):
            n = len(sample.tokens)
            self.place[sample.start : sample.start + n] = self.start[name] + np.arange(
                n
            )

    def _compute(self, samples: list[Sample]) -> None:
        setup, cfg = self.setup, self.setup.cfg.train
        by_start = {sample.start: sample for sample in samples}
        packed = data.pack(samples, range(len(samples)), cfg.row_length)
        total = sum(len(sample.tokens) for sample in samples)
        size = total * self.width * 2 / 1e9
        print(
            f"features of {total} tokens are computed once: {size:.1f} GB in {self.path}"
        )
        progress, done = Progress("features", total), 0
        with self.path.open("r+b") as file:
            for at in range(0, len(packed.tokens), cfg.rows):
                rows = data.rows_of(packed, at, cfg.rows)
                raw = _raw(setup.target_params, to_batch(rows, setup), setup.target_cfg)
                half = np.clip(np.asarray(raw), -65504, 65504).astype(np.float16)
                for r, t in np.argwhere((rows.positions == 0) & (rows.segments > 0)):
                    sample = by_start[int(rows.source[r, t])]
                    n = len(sample.tokens)
                    file.seek(self.n_rows * self.width * 2)
                    file.write(half[r, t : t + n].tobytes())
                    file.flush()
                    line = {"sample": _name(sample), "start": self.n_rows, "n": n}
                    append_line(self.index, line)
                    self.start[line["sample"]] = self.n_rows
                    self.n_rows += n
                    done += n
                progress.show(done)

    def raw(self, packed: Packed) -> Float[Any, "B T X"]:
        """Returns what is stored of one batch; padding gets some sample's.

        Raises:
          LookupError: a batch of samples that were not added.
        """
        real = packed.segments > 0
        source = np.where(real, packed.source, packed.source[real][0])
        if source.max() >= len(self.place) or (self.place[source] < 0).any():
            raise LookupError("no features of this batch: its samples were not added")
        return jnp.asarray(self.rows[self.place[source]])


def _is_entry(row: dict[str, Any], stored: int) -> bool:
    """Tells whether a line names a sample and rows that are there."""
    start, n = row.get("start"), row.get("n")
    if not isinstance(row.get("sample"), str) or type(start) is not int:
        return False
    return type(n) is int and 0 <= start < start + n <= stored


def _name(sample: Sample) -> str:
    tokens = np.ascontiguousarray(sample.tokens, np.int32)
    return hashlib.sha256(tokens.tobytes()).hexdigest()[:24]

"""Finds out why a head drafts badly: tries the usual mistakes of wiring, names what fits.

    python -m experiments.doctor --head=DIR [--set=target_source=DIR]

The head reads some conversations as it was loaded, then with one thing changed at a time:
the layers it reads, its norm switches, its rotary base, the token beside each feature. What
agrees with the target clearly better is kept, and the rest is tried again on top of it.
"""

import dataclasses
import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Array, ArrayLike, Float, Int
from rich.console import Console
from rich.table import Table

from eagle_jax import data, draft, heads, train, weights
from eagle_jax.config import DraftConfig, TargetConfig
from eagle_jax.heads import Head
from eagle_jax.layers import Params
from eagle_jax.train import Batch
from experiments import common, trainer
from experiments.common import Setup
from experiments.features import to_batch

FLAGS = flags.FLAGS
flags.DEFINE_string("head", "", "Folder of the head.", allow_override=True)
flags.DEFINE_multi_string(
    "data", [], "Conversations to read; default: embedded.", allow_override=True
)
flags.DEFINE_integer("rows", 2, "Rows of train.row_length tokens that are read.")

STEPS = 2  # the output of the first is fed back in the second
CLEARLY = 0.02  # more agreement than this is no accident


jit_likeliest = jax.jit(train.likeliest)


class Wiring(NamedTuple):
    """One way to connect a head: its config, and the layers it reads (none: the top)."""

    cfg: DraftConfig
    taps: tuple[int, ...]


class Finding(NamedTuple):
    """A change, how it is made, and the agreement with it."""

    change: str
    remedy: str
    wiring: Wiring
    agreement: float


def main() -> None:
    cfg = common.load_config()
    if not FLAGS.head:
        raise ValueError("--head needs the folder or hub name of a head")
    folder = weights.resolve_head(FLAGS.head)
    if FLAGS.rows < 1:
        raise ValueError(f"rows must be at least 1, got {FLAGS.rows}")
    setup = common.load_setup(cfg)
    head = heads.load_head(folder, setup.target_cfg, dtype=cfg.dtype)
    for note in head.notes:
        print(f"head     {note}")
    found = diagnose(setup, head, read(setup))
    show(found)


def read(setup: Setup) -> Batch:
    """Packs a few conversations."""
    paths = tuple(map(Path, FLAGS.data)) or trainer.TRAINING_DATA
    samples = trainer.read_samples(setup, paths)
    packed = data.pack(samples, range(len(samples)), setup.cfg.train.row_length)
    return to_batch(data.rows_of(packed, 0, FLAGS.rows), setup)


def diagnose(setup: Setup, head: Head, batch: Batch) -> list[list[Finding]]:
    """Returns the findings of every round, the wiring they start from first.

    Raises:
      ValueError: a head of a kind whose wiring cannot be mistaken.
    """
    if head.cfg.head not in ("eagle1", "eagle3") or head.layout == "own":
        raise ValueError(
            f"the doctor knows EAGLE heads in published layouts, this is a "
            f"{head.cfg.head} head ({head.layout} layout)"
        )
    t = setup.target_cfg
    every = dataclasses.replace(t, taps=tuple(range(t.n_layers)))
    layers, top = _features(setup.target_params, batch, every)
    layers = layers.reshape(t.n_layers, t.d_model, *batch.tokens.shape)
    said = jit_likeliest(setup.target_params, top)
    tied = draft.tie(head.params, setup.target_params, head.cfg)

    def agreement(wiring: Wiring) -> float:
        if head.cfg.head == "eagle1":
            given = top
        else:
            given = jnp.concatenate([layers[i] for i in wiring.taps])
        return agrees(names(tied, batch, given, wiring.cfg), said, batch)

    taps = head.taps if head.taps is not None else t.taps
    now = Wiring(head.cfg, taps if head.cfg.head == "eagle3" else ())
    best = Finding("as it was loaded", "", now, agreement(now))
    rounds: list[list[Finding]] = []
    while True:
        tried = [
            Finding(change, remedy, wiring, agreement(wiring))
            for change, remedy, wiring in changes(best.wiring, t)
        ]
        rounds.append([best, *sorted(tried, key=lambda f: -f.agreement)])
        found = rounds[-1][1] if tried else best
        if found.agreement < best.agreement + CLEARLY:
            return rounds
        best = found


def changes(now: Wiring, t: TargetConfig) -> list[tuple[str, str, Wiring]]:
    """Returns the usual mistakes: what differs, how it is set, and the wiring."""
    cfg, L = now.cfg, t.n_layers
    out = []

    def switch(name: str, value: float | bool) -> None:
        changed = dataclasses.replace(cfg, **{name: value})
        key = f'"{name}": {str(value).lower()}'
        out.append(
            (f"{name} {value}", f"{key} in config.json", now._replace(cfg=changed))
        )

    if cfg.head == "eagle3":
        usual = [tuple(i + by for i in now.taps) for by in (-1, 1)]
        usual += [(2, L // 2, L - 3), (1, L // 2 - 1, L - 4), (3, L // 2 + 1, L - 2)]
        usual += [(L // 4, L // 2, 3 * L // 4), (L - 3, L - 2, L - 1)]
        for taps in dict.fromkeys(usual):
            fits = taps == tuple(sorted(set(taps))) and 0 <= taps[0] and taps[-1] < L
            if fits and len(taps) == len(now.taps) and taps != now.taps:
                given = ",".join(map(str, taps))
                out.append(
                    (
                        f"inputs of layers {given}",
                        f"experiments.convert --taps={given}",
                        now._replace(taps=taps),
                    )
                )
        switch("norm_before_residual", not cfg.norm_before_residual)
        switch("norm_output", not cfg.norm_output)
    for theta in dict.fromkeys((10_000.0, 500_000.0, 1_000_000.0, float(t.rope_theta))):
        if theta != cfg.rope_theta:
            switch("rope_theta", theta)
    unshifted = dataclasses.replace(cfg, inputs="unshifted")
    if cfg.inputs != "unshifted":
        out.append(
            (
                "each feature beside its own token",
                "the head was trained on unshifted tokens and has to be trained again",
                now._replace(cfg=unshifted),
            )
        )
    return out


@functools.partial(jax.jit, static_argnames="cfg")
def _features(params: Params, batch: Batch, cfg: TargetConfig) -> tuple[Array, Array]:
    given = train.target_features(params, batch, cfg, DraftConfig(head="eagle3"))
    return given.read, given.top


@functools.partial(jax.jit, static_argnames="cfg")
def names(
    params: Params, batch: Batch, given: Float[Array, "E B T"], cfg: DraftConfig
) -> Int[Array, "I B T"]:
    """What the head names in every slot and unrolled step, as target ids."""

    def name(out: Float[Array, "D B"]) -> Int[Array, " B"]:
        scores = draft.logits(params, out[:, :, None], cfg)[..., 0]
        return draft.to_target(params, jnp.argmax(scores, axis=0)).astype(jnp.int32)

    outs = train.unroll(params, batch, given, cfg, STEPS)
    by_position = [out.transpose(2, 0, 1) for out in outs]
    return jnp.stack([jax.lax.map(name, out, batch_size=128).T for out in by_position])


def agrees(
    named: Int[ArrayLike, "I B T"], said: Int[ArrayLike, "B T"], batch: Batch
) -> float:
    """Share of places where head and target name the same next token, over all steps.

    Slot t of step i speaks about what follows token t + 1 + i.
    """
    heads_say, target_says = np.asarray(named), np.asarray(said)
    real, positions = np.asarray(batch.segments) > 0, np.asarray(batch.positions)
    n_right = n = 0
    for ahead, own in enumerate(heads_say, 1):
        counts = (real & (positions >= ahead))[:, ahead:]
        n_right += int((counts & (own[:, :-ahead] == target_says[:, ahead:])).sum())
        n += int(counts.sum())
    return n_right / max(n, 1)


def show(rounds: list[list[Finding]]) -> None:
    """Prints every round, and what to do."""
    for i, findings in enumerate(rounds):
        base = findings[0]
        title = "one change" if i == 0 else f"on top of: {base.change}"
        table = Table(title=f"agreement with the target, {title}")
        table.add_column("wiring")
        table.add_column("agreement", justify="right")
        for finding in findings:
            table.add_row(finding.change, f"{finding.agreement:.3f}")
        Console(width=None if Console().is_terminal else 100).print(table)
    kept = [findings[0] for findings in rounds[1:]]
    first, last = rounds[0][0].agreement, rounds[-1][0].agreement
    if not kept:
        print(
            f"no change helps: the head is wired as it was trained ({first:.1%} agreement "
            f"over {STEPS} unrolled steps); if that is little, it was trained on another "
            f"target or text, or not enough"
        )
        return
    print(f"agreement rises from {first:.1%} to {last:.1%} with:")
    for finding in kept:
        print(f"  {finding.change}: {finding.remedy}")


if __name__ == "__main__":
    common.run(main)

"""Draft trees as flat arrays, and the integer arithmetic on them.

A tree of six nodes, root first, every parent before its children:

        0            parents = 0 0 0 1 1 3     ancestors  1 . . . . .
       / \\           depths  = 0 1 1 2 2 3                1 1 . . . .
      1   2                                               1 . 1 . . .
     / \\                                                  1 1 . 1 . .
    3   4                                                 1 1 . . 1 .
    |                                                     1 1 . 1 . 1
    5

Row n of `ancestors` marks n and everything above it: what node n may attend to.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.config import RankPath, TreeConfig


class Tree(NamedTuple):
    """Drafted nodes of each row.

    `parents[n] < n` but for the root, whose parent is itself; siblings stand in the draft's
    order of preference and carry distinct tokens; `log_q` is each node's log-probability
    given its parent (nats), 0 for the root.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    depths: Int[Array, "B N"]
    log_q: Float[Array, "B N"]


# The tree of EAGLE-1: ranks of the children at every step down, 25 nodes below the root
# (SafeAILab/EAGLE, branch v1, eagle/model/choices.py).
EAGLE1_PATHS: tuple[RankPath, ...] = tuple(
    tuple(int(rank) for rank in path)
    for path in (
        "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 "
        "0000 0001 0002 00000 00001"
    ).split()
)


def static(paths: tuple[RankPath, ...]) -> TreeConfig:
    """Returns the config of a fixed tree, given the rank path of every node."""
    ordered = tuple(sorted(paths, key=lambda p: (len(p), p)))
    return TreeConfig(
        kind="static",
        width=max((p[-1] + 1 for p in ordered), default=1),
        depth=max((len(p) for p in ordered), default=0),
        n_nodes=len(ordered) + 1,
        paths=ordered,
    )


def chain(depth: int) -> TreeConfig:
    """Returns the config of a chain of `depth` drafted tokens."""
    return TreeConfig(width=1, depth=depth, n_nodes=depth + 1)


def static_parents(paths: tuple[RankPath, ...]) -> np.ndarray:
    """Returns the parent index of the root and of every path, in order."""
    index = {(): 0} | {path: i + 1 for i, path in enumerate(paths)}
    return np.array([0] + [index[path[:-1]] for path in paths], np.int32)


def rows_for(n_nodes: int, batch: int = 1) -> int:
    """Returns how many tokens the target runs for so many nodes: the next power of two.

    What is beyond the nodes is spare. On CPUs 26 tokens take longer than 32, and 6 longer
    than 8 (docs/guide.md); TPUs pad by themselves. Above 32 tokens in the whole batch,
    where time is arithmetic, nothing is added.
    """
    rows = 1 << (n_nodes - 1).bit_length()
    return rows if rows * batch <= 32 else n_nodes


def root_only(root: Int[Array, " B"]) -> Tree:
    """Returns the tree of plain decoding."""
    zeros = jnp.zeros((root.shape[0], 1), jnp.int32)
    return Tree(root[:, None], zeros, zeros, zeros.astype(jnp.float32))


def ancestors(parents: Int[Array, "B N"], depth: int) -> Bool[Array, "B N N"]:
    """Marks, for every node, itself and the nodes above it.

    Args:
      depth: no node lies deeper than this.
    """
    B, N = parents.shape
    marked = jnp.broadcast_to(jnp.eye(N, dtype=bool), (B, N, N))
    above = marked
    for _ in range(depth):
        above = jnp.take_along_axis(above, parents[:, :, None], axis=1)
        marked = marked | above
        # `above` now marks each node's parent, then its grandparent, and so on: row n of
        # the next round reads the row of n's parent.
    return marked


def path_of(
    node_kept: Bool[Array, "B N"], depths: Int[Array, "B N"], depth: int
) -> Int[Array, "B M"]:
    """Lists the kept nodes by depth; at most one is kept per depth, gaps become 0."""
    levels = jnp.arange(depth + 1)
    at_level = node_kept[:, None, :] & (depths[:, None, :] == levels[None, :, None])
    nodes = jnp.arange(depths.shape[1])
    return jnp.sum(jnp.where(at_level, nodes, 0), axis=-1)

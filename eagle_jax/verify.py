"""Which drafted nodes survive, and what comes next: the only sampler of the project.

`sample` says what the target would emit at every node; plain decoding calls the same
function on a tree of one node, so the two laws cannot drift apart. `walk` is integer work.
`accept_with_q` is the other rule, for trees whose tokens were drawn from the draft.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from eagle_jax.config import SamplingConfig
from eagle_jax.tree import Tree, ancestors, path_of


class Verdict(NamedTuple):
    """The accepted branch.

    Args:
      path: node indices from the root (first) down the accepted branch, padded with 0.
      n_accepted: drafted nodes on it; the root and the bonus token do not count.
      next_token: the target's token at its end, and the next root.
    """

    path: Int[Array, "B M"]
    n_accepted: Int[Array, " B"]
    next_token: Int[Array, " B"]


def sample(
    keys: Key[Array, " B"], logits: Float[Array, "V B N"], cfg: SamplingConfig
) -> Int[Array, "B N"]:
    """Draws, at every node, the token the target says there.

    Args:
      keys: one key per row, consumed. A row's draws do not depend on the other rows.
    """
    if cfg.temperature == 0:
        return jnp.argmax(logits, axis=0).astype(jnp.int32)
    u = jax.vmap(lambda key: jax.random.uniform(key, logits.shape[2:]))(keys)
    return _inverse_cdf(distribution(logits, cfg), u)


def distribution(
    logits: Float[Array, "V B N"], cfg: SamplingConfig
) -> Float[Array, "V B N"]:
    """Returns the law p of the next token: temperature, then top-k, top-p, min-p.

    Tokens tied with the last one kept are kept as well, so the law does not depend on how
    a sort breaks ties.
    """
    # Sums along a last axis are several times quicker on CPUs than along a first one.
    logits = logits.astype(jnp.float32).transpose(1, 2, 0)
    # The largest logit is taken off before the division: a tiny temperature then gives the
    # argmax instead of infinities.
    logits = logits - logits.max(axis=-1, keepdims=True)
    logits = logits / max(cfg.temperature, 1e-6)
    filters = [_top_k, _top_p, _min_p]
    if cfg.top_p_first:
        filters = [_top_p, _top_k, _min_p]
    for keep in filters:
        logits = keep(logits, cfg)
    return jax.nn.softmax(logits, axis=-1).transpose(2, 0, 1)


def _top_k(logits: Float[Array, "B N V"], cfg: SamplingConfig) -> Float[Array, "B N V"]:
    if cfg.top_k == 0 or cfg.top_k >= logits.shape[-1]:
        return logits
    return _likeliest(logits, jnp.ones_like(logits), cfg.top_k)


def _top_p(logits: Float[Array, "B N V"], cfg: SamplingConfig) -> Float[Array, "B N V"]:
    """Keeps the smallest set of likeliest tokens whose mass reaches top_p."""
    if cfg.top_p in (0, 1):
        return logits
    return _likeliest(logits, jax.nn.softmax(logits, axis=-1), cfg.top_p)


def _likeliest(
    logits: Float[Array, "B N V"], weight: Float[Array, "B N V"], enough: float | int
) -> Float[Array, "B N V"]:
    """Keeps every token but those below others that weigh `enough` together.

    The distance of the last token kept is found bit by bit: 31 sums over the vocabulary
    are many times quicker than sorting it, and a mesh that cuts it exchanges sums alone.

    Args:
      logits: 0 is the largest of each node.
    """
    # As integers, floating-point numbers of one sign are ordered as they are.
    far = jax.lax.bitcast_convert_type(jnp.abs(logits), jnp.int32)

    def refine(i: Array, last: Int[Array, "B N"]) -> Int[Array, "B N"]:
        farther = last | (1 << (30 - i))
        nearer = jnp.where(far < farther[..., None], weight, 0).sum(axis=-1)
        return jnp.where(nearer < enough, farther, last)

    last = jax.lax.fori_loop(0, 31, refine, jnp.zeros(far.shape[:2], jnp.int32))
    return jnp.where(far <= last[..., None], logits, -jnp.inf)


def _min_p(logits: Float[Array, "B N V"], cfg: SamplingConfig) -> Float[Array, "B N V"]:
    """Keeps tokens at least `min_p` times as likely as the likeliest."""
    if cfg.min_p == 0:
        return logits
    least = logits.max(axis=-1, keepdims=True) + math.log(cfg.min_p)
    return jnp.where(logits >= least, logits, -jnp.inf)


_BLOCK = 256


def _inverse_cdf(p: Float[Array, "V B N"], u: Float[Array, "B N"]) -> Int[Array, "B N"]:
    """Returns the first token whose cumulative probability exceeds u.

    Two levels, blocks of tokens first: a running sum over a whole vocabulary would take
    most of the time of a step. A token of probability 0 is never returned; where there is
    no law, because of NaN, V is, which no node carries.
    """
    V = p.shape[0]
    block = min(_BLOCK, V)
    p = jnp.pad(p.transpose(1, 2, 0), ((0, 0), (0, 0), (0, -V % block)))
    p = p.reshape(*p.shape[:2], -1, block)
    mass = jnp.cumsum(p.sum(axis=-1), axis=-1)
    goal = u[..., None] * mass[..., -1:]
    # Rounding may leave the goal at the very end of a sum: fall back on the last token
    # that has any mass.
    chosen = jnp.minimum(jnp.sum(mass <= goal, axis=-1), _last_positive(p.sum(axis=-1)))
    inside = jnp.take_along_axis(p, chosen[..., None, None], axis=2)[:, :, 0]
    before = jnp.take_along_axis(mass, chosen[..., None], axis=-1)
    before -= inside.sum(axis=-1, keepdims=True)
    within = jnp.sum(before + jnp.cumsum(inside, axis=-1) <= goal, axis=-1)
    within = jnp.minimum(within, _last_positive(inside))
    # A cumulative sum can pass the goal at a token of no mass only through rounding of
    # `before`; the next token with mass is then the right one.
    index = jnp.arange(block)[None, None]
    usable = jnp.where((inside > 0) & (index >= within[..., None]), index, block)
    token = jnp.where(mass[..., -1] > 0, chosen * block + usable.min(axis=-1), V)
    return token.astype(jnp.int32)


def _last_positive(p: Float[Array, "B N X"]) -> Int[Array, "B N"]:
    return jnp.where(p > 0, jnp.arange(p.shape[-1])[None, None], 0).max(axis=-1)


def walk(tree: Tree, sampled: Int[Array, "B N"], depth: int) -> Verdict:
    """Follows each tree from the root for as long as the target agrees with it.

    A node is kept if its token is what the target sampled at its parent and its parent is
    kept. Siblings carry distinct tokens, so one branch survives at most. The emitted tokens
    are draws of the target, whatever the tree (EAGLE-2/3 acceptance; equals EAGLE-1
    Algorithm 1 with q a point mass, SafeAILab/EAGLE utils.py:375-415).

    Args:
      sampled: the target's draw at every node; node n speaks about the children of n.
      depth: most drafted tokens on one path.
    """
    wanted = jnp.take_along_axis(sampled, tree.parents, axis=1)
    agrees = (tree.tokens == wanted) | (tree.depths == 0)
    above = ancestors(tree.parents, depth)
    kept = jnp.all(agrees[:, None, :] | ~above, axis=-1)
    path = path_of(kept, tree.depths, depth)
    n_accepted = jnp.sum(kept, axis=1) - 1
    end = jnp.take_along_axis(path, n_accepted[:, None], axis=1)
    next_token = jnp.take_along_axis(sampled, end, axis=1)[:, 0]
    return Verdict(path=path, n_accepted=n_accepted, next_token=next_token)


class _Visit(NamedTuple):
    """Where the walk of `accept_with_q` stands: scan carry."""

    node: Int[Array, " B"]
    p: Float[Array, "V B"]  # law of the next token, given the siblings rejected so far
    log_q: Float[Array, "V B"]  # what later siblings were drawn from, not normalised


def accept_with_q(
    keys: Key[Array, " B"],
    tree: Tree,
    log_q: Float[Array, "V B N"],
    p: Float[Array, "V B N"],
    depth: int,
) -> Verdict:
    """Accepts or rejects drawn siblings one after the other (EAGLE-1 §3.3, Algorithm 1).

    A sibling x is accepted with probability min(1, p(x) / q(x)). If it is not, p becomes
    the normalised positive part of p - q, and q loses x: siblings are drawn without
    replacement. When none is left the next token is drawn from the p that remains. A
    chain is classic speculative sampling.

    Parents stand before their children and siblings in the order of their draws, so one
    pass over the nodes meets them in the right order.

    Args:
      keys: one per row, consumed. A row's verdict does not depend on the other rows.
      log_q: the law each node's children were drawn from; any value at leaves.
      p: the target's law at every node, after temperature and filters.
    """
    B, N = tree.tokens.shape
    u = jax.vmap(lambda key: jax.random.uniform(key, (N,)))(keys)

    def visit(at: _Visit, n: Array) -> tuple[_Visit, Array]:
        x = tree.tokens[:, n][None]
        q = jax.nn.softmax(at.log_q, axis=0)
        p_x = jnp.take_along_axis(at.p, x, axis=0)[0]
        q_x = jnp.take_along_axis(q, x, axis=0)[0]
        is_child = tree.parents[:, n] == at.node
        accepted = is_child & (u[:, n] * q_x < p_x)
        rejected = is_child & ~accepted
        rest = jnp.maximum(at.p - q, 0)
        mass = rest.sum(axis=0, keepdims=True)
        # Where nothing is left, p equals q but for rounding and a rejection says nothing.
        rest = jnp.where(mass > 0, rest / mass, at.p)
        others = at.log_q.at[x[0], jnp.arange(B)].set(-jnp.inf)
        cases = [accepted[None], rejected[None]]
        return _Visit(
            node=jnp.where(accepted, n, at.node),
            p=jnp.select(cases, [p[:, :, n], rest], at.p),
            log_q=jnp.select(cases, [log_q[:, :, n], others], at.log_q),
        ), accepted

    root = jnp.zeros((B,), jnp.int32)
    end, accepted = jax.lax.scan(
        visit,
        _Visit(root, p[:, :, 0], log_q[:, :, 0]),
        jnp.arange(1, N, dtype=jnp.int32),
    )
    kept = jnp.concatenate([jnp.ones((B, 1), bool), accepted.T], axis=1)
    return Verdict(
        path=path_of(kept, tree.depths, depth),
        n_accepted=accepted.sum(axis=0),
        next_token=_inverse_cdf(end.p[:, :, None], u[:, :1])[:, 0],
    )

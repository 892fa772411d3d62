"""Slow, obvious NumPy versions of what the library computes, from the definitions.

Activations are row-major `[T, D]`, all is float64, and trees are lists and dicts:
no line here is shared with the library or shaped like it.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from scipy import stats

Array = np.ndarray
Law = dict[tuple[int, ...], float]

# --- Llama and the draft heads


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def rope_speed(head_dim: int, theta: float, scaling: Any = None) -> Array:
    """Radians per position of each channel pair, from the closed formulas."""
    speeds = []
    for pair in range(head_dim // 2):
        speed = 1.0 / theta ** (2 * pair / head_dim)
        if scaling is not None and scaling.kind == "linear":
            speed /= scaling.factor
        if scaling is not None and scaling.kind == "llama3":
            wavelength = 2 * math.pi / speed
            low = scaling.original_length / scaling.low_freq_factor
            high = scaling.original_length / scaling.high_freq_factor
            if wavelength > low:
                speed = speed / scaling.factor
            elif wavelength >= high:
                smooth = scaling.original_length / wavelength - scaling.low_freq_factor
                smooth /= scaling.high_freq_factor - scaling.low_freq_factor
                speed = (1 - smooth) * speed / scaling.factor + smooth * speed
        speeds.append(speed)
    return np.array(speeds)


def rotate(head: Array, position: float, speed: Array) -> Array:
    """Turns one head `[C]` at one position, channel c together with channel c + C/2."""
    half = len(head) // 2
    out = np.empty_like(head)
    for c in range(half):
        cos, sin = math.cos(position * speed[c]), math.sin(position * speed[c])
        out[c] = head[c] * cos - head[c + half] * sin
        out[c + half] = head[c + half] * cos + head[c] * sin
    return out


def attention(q: Array, k: Array, v: Array, visible: Array) -> Array:
    """Attention of `[T, H, C]` queries over `[S, K, C]` keys, query by query."""
    T, H, C = q.shape
    group = H // k.shape[1]
    out = np.zeros((T, H, C))
    for t, h in itertools.product(range(T), range(H)):
        seen = np.flatnonzero(visible[t])
        scores = k[seen, h // group] @ q[t, h] / math.sqrt(C)
        weights = np.exp(scores - scores.max())
        out[t, h] = (weights / weights.sum()) @ v[seen, h // group]
    return out


def mix(layer: dict, residual: Array, x: Array, at: Array, visible: Array, cfg: Any):
    """Attention and feed-forward: output, keys, values. q, k and v read `x`.

    `cfg` is a TargetConfig or DraftConfig; only sizes and constants are read.
    """
    T = len(x)
    part = {"q": np.s_[:, :-2], "k": np.s_[:, -2], "v": np.s_[:, -1]}
    speed = rope_speed(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)
    heads = {}
    for name, n in (("q", cfg.n_heads), ("k", cfg.n_kv_heads), ("v", cfg.n_kv_heads)):
        w = np.asarray(layer["wqkv"], np.float64)[part[name]]
        y = x @ w.reshape(n * cfg.head_dim, -1).T
        if "bqkv" in layer:
            y = y + np.asarray(layer["bqkv"], np.float64)[part[name]].reshape(-1)
        heads[name] = y.reshape(T, n, cfg.head_dim)
    if "q_norm" in layer:
        heads["q"] = rms_norm(heads["q"], np.asarray(layer["q_norm"]), cfg.norm_eps)
        heads["k"] = rms_norm(heads["k"], np.asarray(layer["k_norm"]), cfg.norm_eps)
    for name in "qk":
        heads[name] = np.array(
            [[rotate(h, at[t], speed) for h in heads[name][t]] for t in range(T)]
        )
    out = attention(heads["q"], heads["k"], heads["v"], visible).reshape(T, -1)
    wo = np.asarray(layer["wo"], np.float64).reshape(-1, out.shape[1])
    a = residual + out @ wo.T
    n = rms_norm(a, np.asarray(layer["mlp_norm"]), cfg.norm_eps)
    gate_up = np.asarray(layer["w_gate_up"], np.float64)
    down = np.asarray(layer["w_down"], np.float64)
    if "router" not in layer:
        return a + feed_forward(n, gate_up, down), heads["k"], heads["v"]
    gate_up = gate_up.reshape(2, cfg.n_experts, cfg.d_mlp, -1)
    down = down.reshape(-1, cfg.n_experts, cfg.d_mlp)
    scores = n @ np.asarray(layer["router"], np.float64).T
    for t in range(T):
        best = sorted(range(cfg.n_experts), key=lambda e: -scores[t, e])
        best = best[: cfg.n_experts_used]
        shares = np.exp(scores[t, best])
        for e, share in zip(best, shares / shares.sum(), strict=True):
            a[t] += share * feed_forward(n[t], gate_up[:, e], down[:, e])
    return a, heads["k"], heads["v"]


def feed_forward(x: Array, gate_up: Array, down: Array) -> Array:
    gate, up = x @ gate_up[0].T, x @ gate_up[1].T
    return (gate / (1 + np.exp(-gate)) * up) @ down.T


def causal(n: int) -> Array:
    return np.tril(np.ones((n, n), bool))


def llama(params: dict, tokens: Sequence[int], cfg: Any) -> dict[str, Any]:
    """One plain forward: logits, final-norm output, taps, keys, values."""
    embed = np.asarray(params["embed"], np.float64)
    x = embed[list(tokens)]
    taps, keys, values = [], [], []
    for i, layer in enumerate(params["layers"]):
        if i in cfg.taps:
            taps.append(x)
        normed = rms_norm(x, np.asarray(layer["attn_norm"]), cfg.norm_eps)
        at = np.arange(len(x))
        window = cfg.sliding_window or len(x)
        visible = causal(len(x)) & (at[:, None] - at[None, :] < window)
        x, k, v = mix(layer, x, normed, at, visible, cfg)
        keys.append(k)
        values.append(v)
    top = rms_norm(x, np.asarray(params["norm"]), cfg.norm_eps)
    head = np.asarray(params.get("head", params["embed"]), np.float64)
    return {
        "logits": top @ head.T,
        "top": top,
        "taps": np.concatenate(taps, axis=1),
        "keys": keys,
        "values": values,
    }


def draft_layer(
    params: dict,
    tokens: Sequence[int],
    hidden: Array,
    at: Array,
    visible: Array,
    cfg: Any,
):
    """One pass of a draft head (method.md 4.2 and 6.3): outputs, keys, values.

    Args:
      tokens, hidden: token t + 1 and the feature of slot t, of the draft's width.
    """
    e = np.asarray(params["embed"], np.float64)[list(tokens)]
    layer = params["layer"]
    if cfg.head == "eagle1":
        h = np.concatenate([e, hidden], axis=1) @ np.asarray(params["fc"], np.float64).T
        h = h + np.asarray(params.get("fc_bias", 0.0))
        return mix(layer, h, h, at, visible, cfg)
    normed = rms_norm(hidden, np.asarray(layer["hidden_norm"]), cfg.norm_eps)
    e = rms_norm(e, np.asarray(layer["embed_norm"]), cfg.norm_eps)
    residual = normed if cfg.norm_before_residual else hidden
    return mix(layer, residual, np.concatenate([e, normed], 1), at, visible, cfg)


def draft_logits(params: dict, out: Array, cfg: Any) -> Array:
    if cfg.head == "eagle3":
        out = rms_norm(out, np.asarray(params["norm"]), cfg.norm_eps)
    return out @ np.asarray(params["head"], np.float64).T


def draft_fuse(params: dict, features: Array, cfg: Any) -> Array:
    if cfg.head == "eagle1":
        return features
    return features @ np.asarray(params["fuse"], np.float64).T


def draft_after(
    params: dict,
    tokens: Sequence[int],
    features: Array,
    drafted: Sequence[int],
    cfg: Any,
) -> Array:
    """Log q after a prefix and some drafted tokens, everything computed anew.

    Args:
      tokens, features: the pairs (token i + 1, true feature i) of the prefix.
      drafted: tokens below the root; their features are the head's own outputs.
    """
    hidden = draft_fuse(params, features, cfg)
    at = list(tokens)
    for token in [*drafted, None]:
        n = len(at)
        out, _, _ = draft_layer(params, at, hidden, np.arange(n), causal(n), cfg)
        if token is None:
            return log_softmax(draft_logits(params, out[-1:], cfg)[0])
        at.append(token)
        hidden = np.concatenate([hidden, out[-1:]])
    raise AssertionError


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


# --- trees


def beam(
    children: Callable[[tuple[int, ...]], list[tuple[int, float]]],
    expand: int,
    depth: int,
    n_drafted: int,
) -> list[tuple[tuple[int, ...], float]]:
    """The nodes EAGLE-2 keeps, as (token path, value), in the order of the candidates.

    Args:
      children: the drafted next tokens after a path with log-probabilities, best first.
      expand: how many nodes of a level get children.
    """
    candidates: list[tuple[tuple[int, ...], float]] = []
    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(depth):
        level = [
            ((*path, token), value + log_q)
            for path, value in frontier
            for token, log_q in children(path)
        ]
        candidates += level
        frontier = sorted(level, key=lambda node: -node[1])[:expand]  # stable
    kept = sorted(range(len(candidates)), key=lambda i: -candidates[i][1])[:n_drafted]
    return [candidates[i] for i in sorted(kept)]


def parents_of(paths: Sequence[tuple[int, ...]]) -> list[int]:
    """Parent index of the root and of every path below it."""
    order = [(), *paths]
    return [0] + [order.index(path[:-1]) for path in paths]


def ancestors(parents: Sequence[int]) -> Array:
    """0/1 matrix by chasing parents: row n marks n and everything above it."""
    marked = np.zeros((len(parents), len(parents)), bool)
    for n in range(len(parents)):
        node = n
        marked[n, node] = True
        while node != 0:
            node = parents[node]
            marked[n, node] = True
    return marked


def root_path(parents: Sequence[int] | np.ndarray, node: int) -> list[int]:
    """Nodes from the root down to `node`, both included."""
    path = [node]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return path


def children_of(parents: Sequence[int], node: int) -> list[int]:
    return [n for n in range(1, len(parents)) if parents[n] == node]


def walk(
    tokens: Sequence[int], parents: Sequence[int], sampled: Sequence[int]
) -> tuple[list[int], int]:
    """Descends into the child that carries the token sampled at its parent."""
    path, node = [0], 0
    while True:
        by_token = {tokens[n]: n for n in children_of(parents, node)}
        if sampled[node] not in by_token:
            return path, sampled[node]
        node = by_token[sampled[node]]
        path.append(node)


# --- laws of the verification rules, exactly


def filtered(logits: Array, cfg: Any) -> Array:
    """Temperature, top-k, top-p, min-p as the documentation says, token by token."""
    logits = np.asarray(logits, np.float64) / cfg.temperature
    keep = np.ones(len(logits), bool)

    def law() -> Array:
        p = np.where(keep, np.exp(logits - logits[keep].max()), 0.0)
        return p / p.sum()

    def top_k() -> None:
        if cfg.top_k and cfg.top_k < len(logits):
            masked = np.where(keep, logits, -np.inf)
            keep[masked < np.sort(masked)[-cfg.top_k]] = False

    def top_p() -> None:
        if 0 < cfg.top_p < 1:
            p, total = law(), 0.0
            for token in np.argsort(-p, kind="stable"):
                total += p[token]
                if total >= cfg.top_p:
                    keep[p < p[token]] = False
                    return

    for step in (top_p, top_k) if cfg.top_p_first else (top_k, top_p):
        step()
    if cfg.min_p:
        p = law()
        keep[p < cfg.min_p * p.max()] = False
    return law()


Outcome = tuple[tuple[int, ...], int]  # nodes of the accepted path, next token


def law_of_siblings(
    tokens: Sequence[int], parents: Sequence[int], p: Array
) -> dict[Outcome, float]:
    """Outcomes of the official rule with q = 1, sibling by sibling (utils.py:375-415).

    Args:
      p: `[N, V]`, the target's law at every node.
    """

    def below(node: int, path: tuple[int, ...]) -> Iterator[tuple[Outcome, float]]:
        left, law = 1.0, p[node].copy()
        for child in children_of(parents, node):
            accept = law[tokens[child]]
            for outcome, mass in below(child, (*path, child)):
                yield outcome, left * accept * mass
            left *= 1 - accept
            law[tokens[child]] = 0
            if law.sum() == 0:
                return
            law = law / law.sum()
        for token, mass in enumerate(law):
            yield (path, token), left * mass

    return _gather(below(0, (0,)))


def law_with_q(
    tokens: Sequence[int], parents: Sequence[int], q: Array, p: Array
) -> dict[Outcome, float]:
    """Outcomes of Algorithm 1 of EAGLE-1 on one drawn tree.

    Args:
      q, p: `[N, V]`, the laws of draft and target at every node.
    """

    def below(node: int, path: tuple[int, ...]) -> Iterator[tuple[Outcome, float]]:
        left, law, rest = 1.0, p[node].copy(), q[node].copy()
        for child in children_of(parents, node):
            x = tokens[child]
            accept = min(1.0, law[x] / rest[x])
            for outcome, mass in below(child, (*path, child)):
                yield outcome, left * accept * mass
            left *= 1 - accept
            if left < 1e-15:
                return
            law = np.maximum(law - rest, 0)
            law = law / law.sum()
            rest[x] = 0
            rest = rest / rest.sum() if rest.sum() else rest
        for token, mass in enumerate(law):
            yield (path, token), left * mass

    return _gather(below(0, (0,)))


def law_of_draws(q: Array, n: int) -> dict[tuple[int, ...], float]:
    """Law of n siblings drawn one after the other without replacement."""
    out = {}
    for draws in itertools.permutations(range(len(q)), n):
        mass, left = 1.0, 1.0
        for x in draws:
            if q[x] == 0 or left <= 0:
                mass = 0.0
                break
            mass *= q[x] / left
            left -= q[x]
        if mass:
            out[draws] = mass
    return out


def _gather(pairs: Iterator[tuple[Any, float]]) -> dict[Any, float]:
    out: dict[Any, float] = {}
    for key, mass in pairs:
        if mass > 0:
            out[key] = out.get(key, 0.0) + mass
    return out


def law_of_text(logits_after: Callable, n: int, vocab_size: int, cfg: Any) -> Array:
    """Exact joint law of the next n tokens, `[V] * n`, by asking for every prefix."""
    law = np.ones(())
    for k in range(n):
        shape = (vocab_size,) * k
        following = np.zeros((*shape, vocab_size))
        for prefix in itertools.product(range(vocab_size), repeat=k):
            following[prefix] = filtered(logits_after(prefix), cfg)
        law = law[..., None] * following
    return law


# --- statistics


def distance(counts: Array, law: Array) -> tuple[float, float]:
    """Total variation between counts and a law, and what sampling noise alone gives."""
    n = counts.sum()
    measured = 0.5 * np.abs(counts / n - law).sum()
    noise = 0.5 * np.sqrt(2 * law * (1 - law) / (np.pi * n)).sum()
    return float(measured), float(noise)


def p_value(counts: Array, law: Array) -> float:
    """Chi-square test; cells expected fewer than five times are put together."""
    counts, law = np.ravel(counts), np.ravel(law)
    n = counts.sum()
    if counts[law == 0].any():
        return 0.0
    small = law * n < 5
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(law[~small], law[small].sum()) * n
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(observed) < 2:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, len(observed) - 1))

"""Every setting of a run, as frozen dataclasses: hashable, so static arguments of jit.

Only ints, floats, strings, booleans and tuples appear as values. Faults are found when a
config is built, before anything is compiled.
"""

import dataclasses
import hashlib
import itertools
import json
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length.

    kind "llama3" uses all fields (Llama-3.1 release notes); "linear" divides positions by
    `factor`; "dynamic" raises the base once the sequence is longer than `original_length`.
    """

    kind: Literal["llama3", "linear", "dynamic"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """Sizes of a Llama-family target.

    Args:
      n_tokens: ids from here on are padding of the vocabulary and never sampled; 0: none.
      taps: the layers whose *inputs* are features.
      stacked: the layers are one stack, through which a scan runs: compiling then takes
        the time of one layer. Of the cache as much is read as is in use (`cache.prefixes`).
        It is meant for TPUs (see `target`).
    """

    name: str
    vocab_size: int
    d_model: int
    d_mlp: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position: int = 2048
    tied: bool = False  # the output head is the embedding
    qkv_bias: bool = False
    qk_norm: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embed_scale: float = 1.0  # of embeddings as the first layer reads them (Gemma)
    sliding_window: int = 0  # tokens a layer looks back on, itself included; 0: all
    n_experts: int = 0  # a mixture of experts (Mixtral) where it is not 0
    n_experts_used: int = 0
    eos_ids: tuple[int, ...] = ()
    n_tokens: int = 0
    taps: tuple[int, ...] = ()
    stacked: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _require_divides(self, "n_heads", self.n_heads, "n_kv_heads", self.n_kv_heads)
        _require_divides(self, "head_dim", self.head_dim, "a channel pair", 2)
        if not self.taps:
            object.__setattr__(self, "taps", default_taps(self.n_layers))
        bad = [i for i in self.taps if not 0 <= i < self.n_layers]
        if bad or list(self.taps) != sorted(set(self.taps)):
            raise ValueError(
                f"taps must be distinct ascending layer indices below n_layers="
                f"{self.n_layers}, got taps={self.taps}; name other layers in target.taps"
            )


def default_taps(n_layers: int) -> tuple[int, ...]:
    """The official choice 2, L/2, L-3 (SafeAILab/EAGLE modeling_llama_kv.py:1137).

    Below seven layers these repeat or run backwards; then the layers nearest to the first,
    middle and last thirds are taken, and fewer than three layers leave what there is.
    """
    official = (2, n_layers // 2, n_layers - 3)
    if n_layers >= 7:
        return official
    return tuple(sorted({0, n_layers // 2, n_layers - 1}))


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """Sizes and switches of a draft head.

    The norm switches are the published dialects (EAGLE-3.1 and speculators).

    Args:
      head: "none" decodes plainly. "eagle1" is the head of EAGLE-1 and EAGLE-2, "eagle3"
        that of EAGLE-3. "medusa" predicts tokens further ahead from one feature, "small"
        is a language model of its own, "lookup" copies what followed the newest tokens
        the last time.
      inputs: eagle1 only, the study of EAGLE-1 §5.3: the feature and the token after it,
        one of them alone, or the feature and its own ("unshifted") token.
      feature: eagle3 only: un-normed taps, or the final-norm output as in EAGLE-1.
      n_layers: layers of a small model; heads of Medusa.
      ngram: lookup only: most tokens that must agree.
      vocab_size: the draft vocabulary.
      feature_size: width of one target position as the head reads it.
    """

    head: Literal["none", "eagle1", "eagle3", "medusa", "small", "lookup"] = "none"
    inputs: Literal["both", "token", "feature", "unshifted"] = "both"
    feature: Literal["taps", "top"] = "taps"
    n_layers: int = 1
    ngram: int = 3
    vocab_size: int = 0
    d_model: int = 0
    d_mlp: int = 0
    n_heads: int = 1
    n_kv_heads: int = 1
    head_dim: int = 0
    feature_size: int = 0
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    fc_bias: bool = True  # eagle1 only: bias of the 2D -> D input layer
    qkv_bias: bool = False
    norm_before_residual: bool = False  # residual taken after hidden_norm
    norm_output: bool = False  # the normed output is fed to the next level
    fc_norm: bool = False  # one norm per tap before `fuse`
    norm_before_fc: bool = False  # one norm over all taps before `fuse`
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.head in ("none", "lookup"):
            return
        _require_divides(self, "n_heads", self.n_heads, "n_kv_heads", self.n_kv_heads)
        _require_divides(self, "head_dim", self.head_dim, "a channel pair", 2)
        if self.fc_norm and self.norm_before_fc:
            raise ValueError(
                "fc_norm and norm_before_fc exclude each other (as in speculators); set one"
            )

    @property
    def reads_top(self) -> bool:
        """Whether the head reads the final-norm output, not the taps."""
        return self.head != "eagle3" or self.feature == "top"

    @property
    def keeps_first_token(self) -> bool:
        """Whether slot i of the draft holds token i, the root included.

        Other heads hold the pair (feature i, token i+1) there.
        """
        return self.head in ("small", "lookup")


RankPath = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TreeConfig:
    """Shape of the drafted tree.

    Args:
      kind: "dynamic" grows by path confidence and keeps the best nodes (EAGLE-2 §4);
        "static" drafts the fixed `paths`, each a path of ranks below the root (EAGLE-1).
      width: nodes expanded per level and children per expanded node. 1 makes a chain.
      depth: most drafted tokens on one path (the official `depth` argument plus one).
      n_nodes: nodes verified per step, root included. 1 is plain decoding.
      value: expand by the confidence of the whole path; else by the last token's alone.
      rerank: keep the most valuable nodes of all; else the expanded ones, level by level.
        Both are on in EAGLE-2; its ablation switches them off (EAGLE-2 §5.3).
    """

    kind: Literal["dynamic", "static"] = "dynamic"
    width: int = 1
    depth: int = 0
    n_nodes: int = 1
    paths: tuple[RankPath, ...] = ()
    value: bool = True
    rerank: bool = True

    def __post_init__(self) -> None:
        if self.n_nodes < 1 or self.depth < 0 or self.width < 1:
            raise ValueError(
                f"tree needs n_nodes >= 1, depth >= 0, width >= 1, got n_nodes="
                f"{self.n_nodes}, depth={self.depth}, width={self.width}"
            )
        if self.kind == "static":
            self._check_paths()
            return
        if (self.n_nodes == 1) != (self.depth == 0):
            raise ValueError(
                f"a tree of one node has depth 0 and only it, got depth={self.depth}, "
                f"n_nodes={self.n_nodes}; set both or neither"
            )
        if self.depth >= self.n_nodes and self.n_nodes > 1:
            raise ValueError(
                f"tree needs depth < n_nodes, got depth={self.depth}, "
                f"n_nodes={self.n_nodes}; raise n_nodes or lower depth"
            )
        most = 1 + (
            self.n_candidates if self.rerank else self.width * max(self.depth, 1)
        )
        if self.n_nodes > most:
            raise ValueError(
                f"width={self.width} and depth={self.depth} give at most {most} nodes, "
                f"got n_nodes={self.n_nodes}; lower n_nodes or widen the tree"
            )

    def _check_paths(self) -> None:
        seen: set[RankPath] = {()}
        for before, path in itertools.pairwise(self.paths):
            if (len(path), path) < (len(before), before):
                raise ValueError(
                    f"static tree paths must be sorted by length, then by ranks: {path} "
                    f"stands behind {before}; use tree.static(paths), which sorts them"
                )
        for path in self.paths:
            if not path or any(rank < 0 for rank in path):
                raise ValueError(
                    f"static tree path {path} needs ranks >= 0, at least one"
                )
            if path in seen:
                raise ValueError(f"static tree path {path} stands twice")
            if path[:-1] not in seen:
                raise ValueError(f"static tree path {path} has no parent {path[:-1]}")
            if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in seen:
                raise ValueError(
                    f"static tree path {path} skips rank {path[-1] - 1}; ranks of siblings "
                    f"must be 0, 1, 2, ..."
                )
            seen.add(path)
        sizes = {
            "n_nodes": len(self.paths) + 1,
            "depth": max((len(p) for p in self.paths), default=0),
            "width": max((p[-1] + 1 for p in self.paths), default=1),
        }
        for field, size in sizes.items():
            if getattr(self, field) != size:
                raise ValueError(
                    f"static tree paths give {field}={size}, got {field}="
                    f"{getattr(self, field)}; use tree.static(paths)"
                )

    @property
    def n_candidates(self) -> int:
        """Nodes a dynamic tree chooses from: W at level 1, W*W at every later level."""
        return self.width + (self.depth - 1) * self.width**2 if self.depth else 0

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children, so that n-alpha is defined."""
        return self.width == 1 and self.n_nodes > 1


PLAIN = TreeConfig()


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """The law to sample from. temperature 0 means argmax; 0 switches a filter off.

    Filters apply in the order temperature, top-k, top-p, min-p. `top_p_first` is the order
    of the official code (SafeAILab/EAGLE utils.py:38-54).

    Args:
      rule: "point" drafts the draft's likeliest tokens and compares them with one draw of
        the target (EAGLE-2 and 3). "sampled" draws the drafted tokens from the draft at the
        same temperature, unfiltered, and accepts by p/q (EAGLE-1). Both keep the target's
        law, and at temperature 0 they are the same.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    top_p_first: bool = False
    rule: Literal["point", "sampled"] = "point"

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0:
            raise ValueError(
                f"temperature and top_k must be >= 0, got temperature={self.temperature}, "
                f"top_k={self.top_k}"
            )
        if not (0 <= self.top_p <= 1 and 0 <= self.min_p <= 1):
            raise ValueError(
                f"top_p and min_p must lie in [0, 1], got {self.top_p}, {self.min_p}"
            )


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """What one decoding step needs to know: sizes, head, tree and law."""

    target: TargetConfig
    draft: DraftConfig = DraftConfig()
    tree: TreeConfig = TreeConfig()
    sampling: SamplingConfig = SamplingConfig()

    def __post_init__(self) -> None:
        if self.draft.head == "none" and self.tree.n_nodes > 1:
            raise ValueError(
                f"a tree of n_nodes={self.tree.n_nodes} needs a draft head, got "
                f"draft.head='none'; give a head or use the tree of one node"
            )
        dynamic = self.tree.kind == "dynamic" and self.tree.n_nodes > 1
        if self.draft.head == "lookup" and self.tree.width > 1:
            raise ValueError(
                f"lookup drafts a chain, got tree.width={self.tree.width}; use "
                f"tree.chain(depth)"
            )
        if self.draft.head == "medusa" and self.tree.depth > self.draft.n_layers:
            raise ValueError(
                f"{self.draft.n_layers} Medusa heads draft at most as many tokens in a "
                f"row, got tree.depth={self.tree.depth}; lower it"
            )
        if self.sampling.rule == "sampled" and dynamic:
            raise ValueError(
                "rule='sampled' needs a tree whose shape does not depend on the tokens "
                "drawn, got tree.kind='dynamic'; use tree.static(paths)"
            )

    @property
    def draws_drafts(self) -> bool:
        """Whether drafted tokens are drawn, and accepted with the draft's law in view."""
        drawn = self.sampling.rule == "sampled" and self.sampling.temperature > 0
        return drawn and self.tree.n_nodes > 1


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Training of a draft head. Token counts are positions, not characters.

    Args:
      supervised_tokens: stop after this many supervised tokens; the data repeat if needed.
      row_length, rows: one batch is `rows` packed rows of `row_length` tokens.
      accumulate: batches per optimiser step.
      optimiser: "adamw", or "muon" for the matrices (`train.optimiser`), which wants five
        times the learning rate.
      ttt_steps, ttt_decay: unrolled steps of training-time test and the weight 0.8^i of
        step i (SafeAILab/EAGLE traineagle3/main.py:284).
      mask: "label" trains a position if the token it predicts belongs to an answer;
        "official" keeps the unshifted mask of the official code.
      normaliser: divide the loss by "mask" (positions trained) or "slots" (all of them).
      regression_weight, classification_weight: of EAGLE-1's two losses (EAGLE-1 §3.2).
      noise: on the features an EAGLE-1 head reads: "uniform" of +-`noise_width`, as in the
        paper; "official" as in its code, where that width holds at 512 tokens.
      head_from_target: start the draft's own LM head from the target's rows.
      warmup: share of the steps spent raising the learning rate; cosine decay follows.
      held_out: share of the conversations kept for evaluation.
      features: run the target in every step, or once and keep its features on disk
        (2 bytes a number: (taps + 1) * width of them per token).
      top_k_weight: of an extra cross-entropy with the target's ten likeliest tokens (HASS).
      detach: stop gradients between unrolled steps (HASS).
    """

    supervised_tokens: int = 100_000
    row_length: int = 512
    rows: int = 4
    accumulate: int = 1
    optimiser: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-3
    final_learning_rate: float = 1e-4
    warmup: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip_norm: float = 0.5
    ttt_steps: int = 3
    ttt_decay: float = 0.8
    mask: Literal["label", "official"] = "label"
    normaliser: Literal["mask", "slots"] = "mask"
    regression_weight: float = 1.0
    classification_weight: float = 0.1
    top_k_weight: float = 0.0
    detach: bool = False
    noise: Literal["none", "official", "uniform"] = "uniform"
    noise_width: float = 0.1
    head_from_target: bool = True
    long_samples: Literal["cut", "drop"] = "cut"
    held_out: float = 0.03
    evaluate_every: int = 100
    checkpoint_every: int = 25
    features: Literal["online", "stored"] = "online"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for field in (
            "supervised_tokens",
            "row_length",
            "rows",
            "accumulate",
            "ttt_steps",
        ):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"train.{field} must be at least 1, got {getattr(self, field)}"
                )
        if not 0 < self.held_out < 1:
            raise ValueError(f"train.held_out must lie in (0, 1), got {self.held_out}")


@dataclasses.dataclass(frozen=True)
class Config:
    """One run: what to decode, with which head and tree, and how the head is trained.

    Args:
      target_source: "smollm2" (the default target), a folder, a .gguf file or a hub name.
      taps: layers whose inputs an EAGLE-3 head reads; empty means the official choice.
      max_len: most cache slots per row; prompt, new tokens and tree depth must fit.
      stacked: keep the target's layers as one stack (`TargetConfig`).
      quantise: "int8" stores the target's matrices so (`layers.quantise`).
    """

    name: str
    target_source: str = "smollm2"
    taps: tuple[int, ...] = ()
    seed: int = 0
    max_len: int = 2048
    stacked: bool = False
    quantise: Literal["none", "int8"] = "none"
    dtype: str = "float32"
    draft: DraftConfig = DraftConfig()
    tree: TreeConfig = TreeConfig()
    sampling: SamplingConfig = SamplingConfig()
    train: TrainConfig = TrainConfig()

    @property
    def precision(self) -> str:
        """How the target's weights are stored, and the type it computes in."""
        return (
            self.dtype
            if self.quantise == "none"
            else f"{self.quantise} in {self.dtype}"
        )


def override(cfg: T, *assignments: str) -> T:
    """Returns `cfg` with fields changed, from texts such as "tree.depth=6".

    All change at once, since some are valid together only; of two values for one field
    the last counts.

    Raises:
      ValueError: unknown field (with the list of right ones), a value of the wrong type,
        or values that do not go together.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        path, sign, text = assignment.partition("=")
        if not sign:
            raise ValueError(f"expected field=value, got {assignment!r}")
        _collect(changes, cfg, path.split("."), text, path)
    return _replace(cfg, changes)


def _collect(
    changes: dict[str, Any], cfg: Any, names: list[str], text: str, path: str
) -> None:
    fields = sorted(f.name for f in dataclasses.fields(cfg))
    if names[0] not in fields:
        raise ValueError(
            f"no field {path!r}: {names[0]!r} is not one of {', '.join(fields)}"
        )
    old = getattr(cfg, names[0])
    if len(names) > 1:
        if not dataclasses.is_dataclass(old):
            raise ValueError(f"no field {path!r}: {names[0]!r} has no fields")
        inner = changes.setdefault(names[0], {})
        _collect(inner, old, names[1:], text, path)
    elif dataclasses.is_dataclass(old):
        known = ", ".join(f"{path}.{f.name}" for f in dataclasses.fields(old))
        raise ValueError(f"{path!r} is a group of settings; set one of {known}")
    else:
        changes[names[0]] = _parse(get_type_hints(type(cfg))[names[0]], text, path)


def _replace(cfg: T, changes: dict[str, Any]) -> T:
    """Builds the inner configs first; no field holds a dict of its own."""
    new = {
        name: _replace(getattr(cfg, name), value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return dataclasses.replace(cfg, **new)  # type: ignore[type-var]


def _parse(kind: Any, text: str, path: str) -> Any:
    if kind is str:
        return text
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise ValueError(
                f"{path} must be one of {', '.join(get_args(kind))}, got {text!r}"
            )
        return text
    try:
        value = json.loads(text.lower() if kind is bool else text)
    except json.JSONDecodeError:
        value = text
    if kind is float and type(value) is int:
        value = float(value)
    if get_origin(kind) is tuple and isinstance(value, list):
        value = _to_tuple(value)
    if not isinstance(value, get_origin(kind) or kind) or (
        kind is int and value is True
    ):
        wanted = getattr(kind, "__name__", str(kind))
        raise ValueError(f"{path} needs a value of type {wanted}, got {text!r}")
    return value


def _to_tuple(value: Any) -> Any:
    return tuple(_to_tuple(v) for v in value) if isinstance(value, list) else value


def fingerprint(*parts: Any) -> str:
    """Returns 12 hex digits that name these configs, numbers or texts."""

    def plain(part: Any) -> Any:
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            return dataclasses.asdict(part)
        return part

    text = json.dumps([plain(part) for part in parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _require_divides(cfg: Any, big: str, n: int, small: str, k: int) -> None:
    if k < 1 or n % k:
        raise ValueError(
            f"{type(cfg).__name__} needs {big} to be a multiple of {small}, got {big}={n}, "
            f"{small}={k}"
        )

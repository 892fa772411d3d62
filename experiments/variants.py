"""Every variant and baseline by name: its head, its training and its tree.

A name is a base and maybe suffixes, `eagle2_no_value` or `eagle3_ttt5`. What an entry does
not say comes from the config, the same for all. Variants that differ in decoding alone
share one trained head.
"""

import dataclasses
import re
from typing import Any, NamedTuple

from eagle_jax import tree as tree_lib
from eagle_jax.config import Config, DraftConfig, TargetConfig, TrainConfig, TreeConfig


class Variant(NamedTuple):
    """What sets a variant apart.

    Args:
      head: fields of DraftConfig; its "head" is "none" for plain decoding.
      train: fields of TrainConfig.
      tree: "dynamic" (the config's), "static" (EAGLE-1's) or "chain"; fields of the
        dynamic tree follow in `dynamic`.
      trained_as: the variant whose head this one uses; "" if nothing is trained.
      fixed: trained on answers that people wrote (EAGLE-1 Table 6) instead of the target's.
    """

    name: str
    head: dict[str, Any]
    train: dict[str, Any]
    tree: str
    trained_as: str
    dynamic: dict[str, Any]
    fixed: bool = False


CHAIN_DEPTH = 5  # of the chains of EAGLE-1 Table 5 and of n-alpha
ONE_STEP = {"ttt_steps": 1}
EAGLE1 = {"head": "eagle1"}
EAGLE3 = {"head": "eagle3"}

# Name: (head, training, tree, whose head).
BASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "vanilla": ({"head": "none"}, {}, "none", ""),
    # Plain decoding of every prompt twice in a batch: how far rounding alone goes.
    "vanilla_twice": ({"head": "none"}, {}, "none", ""),
    # What the draft reads (EAGLE-1 §5.3.2).
    "token": (EAGLE1 | {"inputs": "token"}, ONE_STEP, "static", "token"),
    "feature": (EAGLE1 | {"inputs": "feature"}, ONE_STEP, "static", "feature"),
    "feature_unshifted": (
        EAGLE1 | {"inputs": "unshifted"},
        ONE_STEP,
        "static",
        "feature_unshifted",
    ),
    "eagle1": (EAGLE1, ONE_STEP, "static", "eagle1"),
    "eagle2": (EAGLE1, ONE_STEP, "dynamic", "eagle1"),
    "hass": (EAGLE1, {"detach": True, "top_k_weight": 0.1}, "dynamic", "hass"),
    # What EAGLE-3 changes, one after the other (EAGLE-3 §4.3).
    "no_feature_loss": (
        EAGLE3 | {"feature": "top"},
        {},
        "dynamic",
        "no_feature_loss",
    ),
    "fused": (EAGLE3, ONE_STEP, "dynamic", "fused"),
    "eagle3": (EAGLE3, {}, "dynamic", "eagle3"),
    "medusa": (
        {"head": "medusa", "n_layers": 5},
        {"ttt_steps": 5},
        "static",
        "medusa",
    ),
    "lookup": ({"head": "lookup"}, {}, "chain", ""),
    "small_draft": (
        {"head": "small", "n_layers": 4},
        ONE_STEP,
        "dynamic",
        "small_draft",
    ),
}
TREES = ("chain", "static", "dynamic")
ABLATIONS: dict[str, dict[str, Any]] = {
    "no_value": {"value": False},
    "no_rerank": {"rerank": False},
    "no_both": {"value": False, "rerank": False},
}
# What `--variant=all` measures.
ALL = (
    *("vanilla", "lookup", "medusa", "small_draft", "small_draft_chain"),
    *("token", "token_chain", "feature", "feature_chain"),
    *("feature_unshifted", "feature_unshifted_chain"),
    *("eagle1", "eagle1_chain", "eagle2", "eagle2_no_value", "eagle2_no_rerank"),
    *("eagle2_no_both", "hass", "no_feature_loss", "fused", "fused_chain", "eagle3"),
    "eagle3_chain",
)


def parse(name: str) -> Variant:
    """Finds a variant by name.

    Raises:
      ValueError: unknown base or suffix, with the right ones.
    """
    base = max((b for b in BASES if re.match(rf"{b}(_|$)", name)), key=len, default="")
    if not base:
        raise ValueError(f"no variant {name!r}; there are {', '.join(BASES)}")
    head, train, tree, trained_as = BASES[base]
    dynamic: dict[str, Any] = {}
    fixed = False
    rest = name[len(base) :]
    while rest:
        found = re.match(
            rf"_({'|'.join([*TREES, *ABLATIONS])}|no_noise|fixed|ttt[1-7])(?=_|$)", rest
        )
        suffix = found[1] if found else ""
        trains = head["head"] in ("eagle1", "eagle3")
        if suffix in TREES and trained_as:
            tree = suffix
        elif suffix in ABLATIONS and tree == "dynamic":
            dynamic = dynamic | ABLATIONS[suffix]
        elif suffix.startswith("ttt") and trains:
            train = train | {"ttt_steps": int(suffix[3:])}
            trained_as = f"{trained_as}_{suffix}"
        elif suffix == "no_noise" and head["head"] == "eagle1":
            train = train | {"noise": "none"}
            trained_as = f"{trained_as}_{suffix}"
        elif suffix == "fixed" and trained_as:
            fixed = True
            trained_as = f"{trained_as}_{suffix}"
        else:
            raise ValueError(
                f"variant {name!r}: {rest!r} does not go with {base}; suffixes are _"
                f"{', _'.join([*TREES, *ABLATIONS])} (trees of trained drafts, dynamic "
                f"ones), _ttt1 to _ttt7 (EAGLE heads), _no_noise (EAGLE-1 heads) and "
                f"_fixed (trained drafts)"
            )
        rest = rest[len(suffix) + 1 :]
    return Variant(name, head, train, tree, trained_as, dynamic, fixed)


def apply(variant: Variant, cfg: Config) -> Config:
    """Returns the run's config with the fields of one variant changed."""
    train: TrainConfig = dataclasses.replace(cfg.train, **variant.train)
    return dataclasses.replace(cfg, train=train, tree=tree_of(variant, cfg))


def tree_of(variant: Variant, cfg: Config) -> TreeConfig:
    """Returns the tree a variant drafts."""
    if variant.tree == "none":
        return TreeConfig()
    if variant.tree == "chain":
        return tree_lib.chain(CHAIN_DEPTH)
    if variant.tree == "static":
        return tree_lib.static(tree_lib.EAGLE1_PATHS)
    return dataclasses.replace(cfg.tree, **variant.dynamic)


def head_config(variant: Variant, cfg: Config, target: TargetConfig) -> DraftConfig:
    """Completes a config's draft sizes for one variant and this target.

    Parameters are trained in float32 whatever the run's dtype: in bfloat16 most updates
    would be rounded away. `train.dtype` is that of the arithmetic.
    """
    if variant.head["head"] == "lookup":
        return DraftConfig(**variant.head)
    if cfg.draft.d_model != target.d_model:
        raise ValueError(
            f"a head is trained at its target's width d_model={target.d_model}, since it "
            f"reads the target's embedding; got draft.d_model={cfg.draft.d_model}"
        )
    if not 0 < cfg.draft.vocab_size <= target.vocab_size:
        raise ValueError(
            f"draft.vocab_size must lie in 1..{target.vocab_size}, the target's "
            f"vocabulary; got {cfg.draft.vocab_size}"
        )
    draft = dataclasses.replace(cfg.draft, **variant.head, dtype="float32")
    if draft.head == "small":
        plain = TargetConfig.activation, TargetConfig.embed_scale, False, 0
        special = target.activation, target.embed_scale, target.qk_norm
        if (*special, target.n_experts) != plain:
            raise ValueError(
                "small_draft takes over the target's first layers, and this target has "
                "norms of q and k, experts, another activation or scaled embeddings, "
                "which a small model here has not"
            )
        same = ("d_mlp", "n_heads", "n_kv_heads", "head_dim", "norm_eps", "rope_theta")
        same += ("rope_scaling", "qkv_bias")
        draft = dataclasses.replace(
            draft,
            n_layers=min(draft.n_layers, target.n_layers),
            **{name: getattr(target, name) for name in same},
        )
    n_read = 1 if draft.reads_top else len(target.taps)
    return dataclasses.replace(draft, feature_size=n_read * target.d_model)

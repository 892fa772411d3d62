"""The targets of the EAGLE papers: their sizes, and an EAGLE-3 head for each.

Every `configs/NAME.py` of a paper's target hands out `get_config()`, and `TARGET`, which
`experiments.compile_tpu` needs, since it never sees weights.
"""

from typing import Any, NamedTuple

from eagle_jax.config import (
    Config,
    DraftConfig,
    RopeScaling,
    TargetConfig,
    TrainConfig,
    TreeConfig,
)

LLAMA3_ROPE = RopeScaling("llama3", factor=8.0, original_length=8192)


class PaperTarget(NamedTuple):
    """A target as published.

    Args:
      n_params: from its model card, exactly; a test counts them.
      papers: its names, and those of targets of the same sizes, in the papers' tables.
      n_nodes: nodes of the dynamic tree (EAGLE-2 §5: 60, 50 and 48 for 7B, 13B and 70B).
    """

    sizes: TargetConfig
    hub_name: str
    n_params: int
    papers: tuple[str, ...]
    n_nodes: int


def llama(name: str, **sizes: Any) -> TargetConfig:
    """Returns a bfloat16 target of the first two Llama generations, layers stacked."""
    plain = {"vocab_size": 32000, "head_dim": 128, "n_kv_heads": sizes["n_heads"]}
    return TargetConfig(name=name, stacked=True, dtype="bfloat16", **(plain | sizes))


def config(target: PaperTarget) -> Config:
    """Returns the run that trains and measures an EAGLE-3 head for a target."""
    t = target.sizes
    return Config(
        name=t.name,
        target_source=target.hub_name,
        stacked=t.stacked,
        dtype=t.dtype,
        draft=DraftConfig(
            vocab_size=32000,
            d_model=t.d_model,
            d_mlp=t.d_mlp,
            n_heads=t.n_heads,
            n_kv_heads=t.n_kv_heads,
            head_dim=t.head_dim,
            norm_eps=t.norm_eps,
        ),
        tree=TreeConfig(width=10, depth=8, n_nodes=target.n_nodes),
        train=TrainConfig(
            row_length=2048,
            rows=8,
            ttt_steps=7,
            supervised_tokens=100_000_000,
            learning_rate=5e-5,
            final_learning_rate=5e-6,
            checkpoint_every=500,
            evaluate_every=500,
            dtype="bfloat16",
        ),
    )

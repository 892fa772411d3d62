"""Mixtral 8x7B Instruct v0.1: eight experts, two of which every token uses.

python -m experiments.compile_tpu --config=configs/mixtral_8x7b.py --topology=v5e:2x4

All experts are computed for every token, so a plain step reads all of them as well; the
speedup of a tree over it is then that of a dense model of this size, not the paper's.
"""

from configs import papers
from eagle_jax.config import Config

TARGET = papers.PaperTarget(
    sizes=papers.llama(
        "mixtral_8x7b",
        d_model=4096,
        d_mlp=14336,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        rope_theta=1_000_000.0,
        n_experts=8,
        n_experts_used=2,
    ),
    hub_name="mistralai/Mixtral-8x7B-Instruct-v0.1",
    n_params=46_702_792_704,
    papers=("Mixtral 8x7B Instruct v0.1",),
    n_nodes=48,  # not in EAGLE-2's table: that of its largest target
)


def get_config() -> Config:
    return papers.config(TARGET)

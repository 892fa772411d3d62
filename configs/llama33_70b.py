"""Llama-3.3-70B-Instruct; Llama-3 70B has the same sizes.

python -m experiments.compile_tpu --config=configs/llama33_70b.py --topology=v5e:2x4
"""

from configs import papers
from eagle_jax.config import Config, TargetConfig

TARGET = papers.PaperTarget(
    sizes=TargetConfig(
        name="llama33_70b",
        vocab_size=128256,
        d_model=8192,
        d_mlp=28672,
        n_layers=80,
        n_heads=64,
        n_kv_heads=8,
        head_dim=128,
        rope_theta=500000.0,
        rope_scaling=papers.LLAMA3_ROPE,
        max_position=131072,
        stacked=True,
        dtype="bfloat16",
    ),
    hub_name="meta-llama/Llama-3.3-70B-Instruct",
    n_params=70_553_706_496,
    papers=("LLaMA-3.3-70B-Instruct", "LLaMA3-Instruct 70B"),
    n_nodes=48,
)


def get_config() -> Config:
    return papers.config(TARGET)

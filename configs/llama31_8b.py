"""Llama-3.1-8B-Instruct; DeepSeek-R1-Distill and Llama-3 8B have the same sizes.

python -m experiments.compile_tpu --config=configs/llama31_8b.py --topology=v5e:2x4
"""

from configs import papers
from eagle_jax.config import Config, TargetConfig

TARGET = papers.PaperTarget(
    sizes=TargetConfig(
        name="llama31_8b",
        vocab_size=128256,
        d_model=4096,
        d_mlp=14336,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        rope_theta=500000.0,
        rope_scaling=papers.LLAMA3_ROPE,
        max_position=131072,
        stacked=True,
        dtype="bfloat16",
    ),
    hub_name="meta-llama/Llama-3.1-8B-Instruct",
    n_params=8_030_261_248,
    papers=(
        "LLaMA-3.1-8B-Instruct",
        "DeepSeek-R1-Distill-LLaMA-8B",
        "LLaMA3-Instruct 8B",
    ),
    n_nodes=60,
)


def get_config() -> Config:
    return papers.config(TARGET)

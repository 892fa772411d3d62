"""LLaMA2-Chat 70B.

python -m experiments.compile_tpu --config=configs/llama2_70b.py --topology=v5e:2x4
"""

from configs import papers
from eagle_jax.config import Config

TARGET = papers.PaperTarget(
    sizes=papers.llama(
        "llama2_70b",
        d_model=8192,
        d_mlp=28672,
        n_layers=80,
        n_heads=64,
        n_kv_heads=8,
    ),
    hub_name="meta-llama/Llama-2-70b-chat-hf",
    n_params=68_976_648_192,
    papers=("LLaMA2-Chat 70B",),
    n_nodes=48,
)


def get_config() -> Config:
    return papers.config(TARGET)

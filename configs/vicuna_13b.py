"""Vicuna 13B v1.3, and LLaMA2-Chat 13B, which has the same sizes.

python -m experiments.compile_tpu --config=configs/vicuna_13b.py --topology=v5e:2x4
"""

from configs import papers
from eagle_jax.config import Config

TARGET = papers.PaperTarget(
    sizes=papers.llama(
        "vicuna_13b",
        d_model=5120,
        d_mlp=13824,
        n_layers=40,
        n_heads=40,
    ),
    hub_name="lmsys/vicuna-13b-v1.3",
    n_params=13_015_864_320,
    papers=("Vicuna 13B", "LLaMA2-Chat 13B"),
    n_nodes=50,
)


def get_config() -> Config:
    return papers.config(TARGET)

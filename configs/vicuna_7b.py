"""Vicuna 7B v1.3, and LLaMA2-Chat 7B, which has the same sizes.

python -m experiments.compile_tpu --config=configs/vicuna_7b.py --topology=v5e:2x4
"""

from configs import papers
from eagle_jax.config import Config

TARGET = papers.PaperTarget(
    sizes=papers.llama(
        "vicuna_7b",
        d_model=4096,
        d_mlp=11008,
        n_layers=32,
        n_heads=32,
    ),
    hub_name="lmsys/vicuna-7b-v1.3",
    n_params=6_738_415_616,
    papers=("Vicuna 7B", "LLaMA2-Chat 7B"),
    n_nodes=60,
)


def get_config() -> Config:
    return papers.config(TARGET)

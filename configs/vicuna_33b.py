"""Vicuna 33B v1.3: 52 heads, which no power of two above 4 divides.

python -m experiments.compile_tpu --config=configs/vicuna_33b.py --topology=v5e:2x4
"""

from configs import papers
from eagle_jax.config import Config

TARGET = papers.PaperTarget(
    sizes=papers.llama(
        "vicuna_33b",
        d_model=6656,
        d_mlp=17920,
        n_layers=60,
        n_heads=52,
    ),
    hub_name="lmsys/vicuna-33b-v1.3",
    n_params=32_528_943_616,
    papers=("Vicuna 33B",),
    n_nodes=50,
)


def get_config() -> Config:
    return papers.config(TARGET)

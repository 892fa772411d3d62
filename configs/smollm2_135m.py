"""SmolLM2-135M-Instruct: a real chat model for which a CPU can train a head.

    python -m experiments.ablate --variant=eagle3

The quick preset trains an EAGLE-3 head of 9.8M parameters on 100,000 supervised tokens.
"""

from eagle_jax.config import Config, DraftConfig, TrainConfig, TreeConfig


def get_config() -> Config:
    return Config(
        name="smollm2_135m",
        target_source="smollm2",
        max_len=2048,
        draft=DraftConfig(
            vocab_size=8192,
            d_model=576,
            d_mlp=1536,
            n_heads=9,
            n_kv_heads=3,
            head_dim=64,
            norm_eps=1e-5,
            rope_theta=10000.0,
        ),
        # What `experiments.tune` chose on two CPU cores; accelerators want larger trees.
        tree=TreeConfig(width=4, depth=2, n_nodes=4),
        train=TrainConfig(row_length=768, rows=1, optimiser="muon", learning_rate=5e-3),
    )

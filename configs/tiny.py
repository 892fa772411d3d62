"""A random target of a few thousand weights: seconds on a CPU, for tests and CI.

python -m experiments.ablate --config=configs/tiny.py --variant=eagle3 --preset=smoke
"""

import jax
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from eagle_jax import target
from eagle_jax.config import Config, DraftConfig, TargetConfig, TrainConfig, TreeConfig
from eagle_jax.layers import Params
from eagle_jax.text import Text

SPECIAL = ["<|im_end|>", "<|im_start|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def get_config() -> Config:
    return Config(
        name="tiny",
        target_source="tiny",
        max_len=2048,
        draft=DraftConfig(
            vocab_size=64, d_model=32, d_mlp=64, n_heads=4, n_kv_heads=2, head_dim=8
        ),
        tree=TreeConfig(width=3, depth=3, n_nodes=8),
        train=TrainConfig(row_length=256, rows=2, supervised_tokens=2000),
    )


def load(dtype: str, taps: tuple[int, ...]) -> tuple[TargetConfig, Params, Text]:
    """Returns a random byte-level chat model."""
    cfg = TargetConfig(
        name="tiny",
        vocab_size=258,
        d_model=32,
        d_mlp=64,
        n_layers=8,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        eos_ids=(0,),
        taps=taps,
        dtype=dtype,
    )
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIAL + letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIAL])
    text = Text(tokenizer=tokenizer, template=TEMPLATE, bos="", eos=SPECIAL[0])
    return cfg, target.init(jax.random.key(0), cfg), text

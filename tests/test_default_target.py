"""The default target against transformers loading the same GGUF by its own loader."""

import drivers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax import cache, columns, decode, draft, heads, target, weights
from eagle_jax import text as text_lib
from eagle_jax.config import DecodeConfig, TreeConfig

SHIPPED = drivers.ROOT / "experiments" / "heads"

PROMPTS = (
    "Why is the sky blue?",
    "Write a haiku about the sea, then explain it.",
    "A train leaves at 9:40 and arrives at 12:15. How long is the trip?",
)
VARIED = (
    "def f(x):\n\treturn x**2  # squares\n\n  Leading blanks, 1234567 digits, "
    "naïve café, 日本語, Здравствуй, 🙂🚀 <|im_start|>user\nHi<|im_end|>\n"
)


@pytest.fixture(scope="module")
def loaded(default_target):
    cfg, params = weights.load_target(default_target)
    return cfg, params, text_lib.load_text(default_target)


def prompt_ids(text, said: str) -> list[int]:
    messages = [{"role": "user", "content": said}]
    return text_lib.encode(text, text_lib.render(text, messages, True))


def test_default_target_answers_in_english(loaded):
    cfg, params, text = loaded
    out = decode.generate(
        {"target": params}, [prompt_ids(text, "What is 2 + 2?")], DecodeConfig(cfg), 24
    )
    assert "4" in text_lib.decode(text, out[0])


@pytest.mark.parametrize("name", ["eagle3", "eagle2"])
def test_the_cpu_kernel_changes_no_answer(loaded, monkeypatch, name):
    """Trees of four nodes run through `columns`, plain decoding through XLA alone."""
    cfg, params, text = loaded
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # conftest makes eight
    assert columns.suits(jnp.ones((1536, 576)), jnp.ones((576, 4)))
    head = heads.load_head(SHIPPED / name, cfg)
    assert head.taps == (cfg.taps if name == "eagle3" else None)
    assert head.cfg.vocab_size == 8192
    tree = TreeConfig(width=4, depth=2, n_nodes=4)
    both = {"target": params, "draft": draft.tie(head.params, params, head.cfg)}
    prompts = [prompt_ids(text, said) for said in PROMPTS]
    for prompt in prompts:
        plain = decode.generate({"target": params}, [prompt], DecodeConfig(cfg), 64)
        drafted = decode.generate(both, [prompt], DecodeConfig(cfg, head.cfg, tree), 64)
        assert drafted == plain


@pytest.fixture(scope="module")
def reference(default_target):
    pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    import torch  # pyright: ignore[reportMissingImports]

    folder, name = str(default_target.parent), default_target.name
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    return model.eval(), tokenizer


@pytest.mark.filterwarnings("ignore")
def test_tokenizer_ids_equal_transformers(loaded, reference):
    text, (_, tokenizer) = loaded[2], reference
    assert text_lib.encode(text, VARIED) == tokenizer.encode(
        VARIED, add_special_tokens=False
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("said", PROMPTS)
def test_logits_and_features_equal_transformers(loaded, reference, said):
    import torch  # pyright: ignore[reportMissingImports]

    cfg, params, text = loaded
    ids = prompt_ids(text, said)
    with torch.no_grad():
        theirs = reference[0](torch.tensor([ids]), output_hidden_states=True)
    n = len(ids)
    nothing = cache.init(cfg.n_layers, 1, cfg.n_kv_heads, cfg.head_dim, 0, cfg.dtype)
    out = target.forward(
        params,
        jnp.asarray([ids], jnp.int32),
        jnp.arange(n, dtype=jnp.int32)[None],
        jnp.tril(jnp.ones((1, n, n), bool)),
        nothing,
        cfg,
    )
    logits = np.asarray(target.logits(params, out.top))[:, 0].T
    np.testing.assert_allclose(logits, theirs.logits[0].numpy(), atol=2e-3)
    taps = np.concatenate([theirs.hidden_states[i][0].numpy().T for i in cfg.taps])
    scale = np.abs(taps).max()
    np.testing.assert_allclose(
        np.asarray(out.taps)[:, 0] / scale, taps / scale, atol=1e-5
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("said", PROMPTS)
def test_128_greedy_tokens_equal_transformers(loaded, reference, said):
    import dataclasses

    import torch  # pyright: ignore[reportMissingImports]

    cfg, params, text = loaded
    ids = prompt_ids(text, said)
    with torch.no_grad():
        theirs = (
            reference[0]
            .generate(
                torch.tensor([ids]),
                attention_mask=torch.ones((1, len(ids)), dtype=torch.long),
                max_new_tokens=128,
                min_new_tokens=128,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(ids) :]
            .tolist()
        )
    endless = dataclasses.replace(cfg, eos_ids=())
    ours = decode.generate({"target": params}, [ids], DecodeConfig(endless), 128)[0]
    assert ours == theirs

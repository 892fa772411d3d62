"""Tokenizers and chat templates, against transformers where it is installed."""

import json

import gguf
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from eagle_jax import text, weights

VARIED = (
    "def f(x):\n\treturn x ** 2  # squares\n",
    "   leading blanks, and   several  inside \n\n\n and trailing   ",
    "In 2024, 1234567 people paid $3.50; pi = 3.14159.",
    "Привет мир, 你好世界, こんにちは, العربية, हिन्दी, ελληνικά",
    "emoji 🙂👩‍👩‍👧‍👦🇫🇷 and accents: naïve café e\u0301",
    "<|im_start|>user\nI'm <|im_end|> here<|endoftext|><repo_name>they'LL",
    "",
    "\r\n\x00\u200b\ufffd",
)
CHATS = (
    [{"role": "user", "content": "Hi <b>there</b> & you"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 2+2? "}],
    [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye 👋"},
    ],
)


@pytest.fixture(scope="module")
def default_target():
    """The default target's file; tests that need it skip where it is not cached."""
    path = weights.default_cache_dir() / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file():
        pytest.skip("the default target is not in the cache")
    return path


@pytest.fixture(scope="module")
def smollm(default_target):
    return text.load_text(default_target)


@pytest.fixture(scope="module")
def theirs(default_target):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    return transformers.AutoTokenizer.from_pretrained(
        str(default_target.parent), gguf_file=default_target.name
    )


@pytest.mark.parametrize("string", VARIED)
def test_tokens_equal_those_of_transformers(smollm, theirs, string):
    ids = text.encode(smollm, string)
    assert ids == theirs(string, add_special_tokens=False)["input_ids"]
    for skip in (True, False):
        wanted = theirs.decode(ids, skip_special_tokens=skip)
        assert text.decode(smollm, ids, skip) == wanted


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_rendered_chats_equal_those_of_transformers(smollm, theirs, messages, prompt):
    wanted = theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompt
    )
    assert text.render(smollm, messages, prompt) == wanted


@pytest.mark.parametrize("string", VARIED)
def test_decoding_undoes_encoding(smollm, string):
    assert (
        text.decode(smollm, text.encode(smollm, string), skip_special=False) == string
    )


def test_default_system_prompt_is_written(smollm):
    out = text.render(smollm, [{"role": "user", "content": "Hi"}], True)
    assert out == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
        "Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text.encode(smollm, out)[0] == 1  # one token, not its letters
    assert (smollm.bos, smollm.eos) == ("<|im_start|>", "<|im_end|>")


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {% if m.role not in ('user', 'system') %}\n"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}\n"
    "{{ m.content | tojson }}{% endfor %}"
    "{% if add_generation_prompt and tools is none %}>"
    "{{ strftime_now('%%') }}{% endif %}"
)


def small_tokenizer():
    vocab = {"a": 0, "b": 1, "ab": 2, "<s>": 3, "</s>": 4, "1": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore
        single="<s> $A", special_tokens=[("<s>", 3)]
    )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    return tokenizer


def write_folder(folder, **config):
    small_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_folder_gives_tokenizer_template_and_special_tokens(tmp_path):
    got = text.load_text(write_folder(tmp_path, chat_template=TEMPLATE))
    assert (got.bos, got.eos, got.template) == ("<s>", "</s>", TEMPLATE)
    ids = text.encode(got, "<s>aba</s>")  # not cut, not padded, no second <s>
    assert ids == [3, 2, 0, 4]
    assert text.decode(got, ids).replace(" ", "") == "aba"
    assert "<s>" in text.decode(got, ids, skip_special=False)


def test_templates_get_the_helpers_they_are_written_for(tmp_path):
    got = text.load_text(write_folder(tmp_path, chat_template=TEMPLATE))
    chat = [{"role": "user", "content": "é<&"}]
    assert text.render(got, chat, True) == '<s>"é<&">%'
    assert text.render(got, chat, False) == '<s>"é<&"'
    with pytest.raises(ValueError, match="refuses these messages: no role tool"):
        text.render(got, [{"role": "tool", "content": ""}], True)


@pytest.mark.parametrize(
    "template", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"]
)
def test_templates_cannot_reach_outside_the_sandbox(tmp_path, template):
    got = text.load_text(write_folder(tmp_path, chat_template=template))
    with pytest.raises(ValueError, match="unsafe"):
        text.render(got, [], True)


def test_template_file_and_named_templates_are_found(tmp_path):
    named = [
        {"name": "tool_use", "template": "t"},
        {"name": "default", "template": "d"},
    ]
    write_folder(tmp_path, chat_template=named)
    assert text.load_text(tmp_path).template == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert text.load_text(tmp_path).template == "file"


def test_missing_template_and_tokenizer_are_explained(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        text.load_text(tmp_path)
    got = text.load_text(write_folder(tmp_path))
    with pytest.raises(ValueError, match="no chat template; give plain text"):
        text.render(got, [], True)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged"):
        text.load_text(tmp_path)


def write_vocabulary(file, model="gpt2", pre="smollm"):
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<s>", "</s>", "<t>", "1", "2", "12", "a", "Ġ", "Ġa"])
    writer.add_token_types([3, 3, 4, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["1 2", "Ġ a"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def test_gguf_vocabulary_with_special_and_added_tokens(tmp_path):
    got = text.load_text(write_vocabulary(tmp_path / "v.gguf"))
    out = text.render(got, [{"role": "user", "content": "12<t> a"}], True)
    ids = text.encode(got, out)
    assert ids == [0, 3, 4, 2, 8, 1]  # digits stay apart though a merge exists
    assert text.decode(got, ids) == "12<t> a"  # added, but not special
    assert text.decode(got, ids, skip_special=False) == "<s>12<t> a</s>"


def test_gguf_splitter_is_chosen_by_its_name(tmp_path):
    got = text.load_text(write_vocabulary(tmp_path / "v.gguf", pre="llama-bpe"))
    assert text.encode(got, "12 a") == [5, 8]
    got = text.load_text(write_vocabulary(tmp_path / "v.gguf", pre="qwen2"))
    assert text.encode(got, "12 a") == [3, 4, 8]


@pytest.mark.parametrize(("model", "pre"), [("llama", "default"), ("gpt2", "tekken")])
def test_unknown_gguf_tokenizers_are_refused_by_name(tmp_path, model, pre):
    file = write_vocabulary(tmp_path / "v.gguf", model, pre)
    with pytest.raises(ValueError, match=f"model='{model}', pre='{pre}'"):
        text.load_text(file)

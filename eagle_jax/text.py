"""Tokenizer and chat template of a target, from the files its weights come from.

A template writes its own special tokens, the first one included, so `encode` adds none.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

from eagle_jax import jsonfile
from eagle_jax import template as template_lib
from eagle_jax.tensorfile import read_gguf

T = TypeVar("T")


class Text(NamedTuple):
    """Tokenizer and chat template; strings are "" where a target has none."""

    tokenizer: Tokenizer
    template: str
    bos: str
    eos: str


def load_text(path: Path) -> Text:
    """Loads tokenizer and template from a .gguf file or a Hugging Face folder.

    Raises:
      ValueError: a file is missing or damaged, or the kind of tokenizer is unsupported.
    """
    return _from_gguf(path) if path.is_file() else _from_folder(path)


def render(
    text: Text, messages: list[dict[str, Any]], add_generation_prompt: bool
) -> str:
    """Writes a conversation as one string, by the target's own chat template.

    Args:
      messages: dicts with "role" and "content".
      add_generation_prompt: end with the opening of an assistant's turn.

    Raises:
      ValueError: there is no template, or it refuses the messages.
    """
    if not text.template:
        raise ValueError("this target has no chat template; give plain text instead")
    variables = {
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
        "bos_token": text.bos,
        "eos_token": text.eos,
        "tools": None,
        "documents": None,
    }
    return template_lib.render(text.template, variables)


def encode(text: Text, string: str) -> list[int]:
    """Returns token ids; special tokens in `string` are recognised, none are added.

    Raises:
      ValueError: the tokenizer cannot encode this.
    """
    return _guarded(
        "the tokenizer cannot encode this text",
        lambda: text.tokenizer.encode(string, add_special_tokens=False).ids,
    )


def decode(text: Text, ids: Sequence[int], skip_special: bool = True) -> str:
    """Returns the text of `ids`, without special tokens unless asked for."""
    return text.tokenizer.decode(list(ids), skip_special_tokens=skip_special)


def _from_folder(path: Path) -> Text:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"{path} has no tokenizer.json; save the tokenizer in its fast form there"
        )
    tokenizer = _guarded(
        f"{file} is damaged or too new", lambda: Tokenizer.from_file(str(file))
    )
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= 1 << 31:
        raise ValueError(f"{file} is damaged: it has a token of id {highest}")
    # Training leftovers in some files; they would cut or pad prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = path / "tokenizer_config.json"
    c = jsonfile.read_object(config) if config.is_file() else {}
    jinja = path / "chat_template.jinja"
    template = c.get("chat_template")
    if jinja.is_file():
        try:
            template = jinja.read_text("utf-8")
        except UnicodeDecodeError as err:
            raise ValueError(f"{jinja} is no text ({err}); fetch it again") from err
    elif isinstance(template, list):  # several named ones
        named = [t for t in template if isinstance(t, dict)]
        template = next((t.get("template") for t in named if _is_default(t)), None)
    found = (template, _content(c.get("bos_token")), _content(c.get("eos_token")))
    if not all(isinstance(x, str | None) for x in found):
        raise ValueError(
            f"{config}: chat_template, bos_token and eos_token must be texts; "
            f"fetch it again"
        )
    return Text(tokenizer, *(x or "" for x in found))


def _is_default(template: dict[str, Any]) -> bool:
    return template.get("name") == "default"


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _guarded(fault: str, call: Callable[[], T]) -> T:
    """Calls the tokenizers library, whose errors are plain or no Exceptions at all."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as err:  # a panic of its Rust code is a BaseException
        raise ValueError(f"{fault} ({err})") from err


_CONTROL, _USER_DEFINED = 3, 4

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _splitter(pre: str) -> PreTokenizer | None:
    """Returns how text is cut before merging, by its name in llama.cpp llama-vocab."""
    if pre in ("gpt-2", "default"):
        return ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        first: PreTokenizer = Digits(individual_digits=True)
        return pre_tokenizers.Sequence([first, ByteLevel(add_prefix_space=False)])
    if pre in ("llama-bpe", "qwen2"):
        words = _WORDS % ("{1,3}" if pre == "llama-bpe" else "")
        first = Split(Regex(words), "isolated")
        rest = ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([first, rest])
    return None


def _from_gguf(path: Path) -> Text:
    fields = read_gguf(path).fields
    f = {k.removeprefix("tokenizer.ggml."): v for k, v in fields.items()}
    return _guarded(
        f"{path}: its tokenizer is damaged or not supported",
        lambda: _from_fields(path, f, fields.get("tokenizer.chat_template", "")),
    )


def _from_fields(path: Path, f: dict[str, Any], template: str) -> Text:
    kind, pre = f.get("model"), f.get("pre", "default")
    splitter = _splitter(pre)
    if kind != "gpt2" or splitter is None or "merges" not in f:
        raise ValueError(
            f"{path}: tokenizer model={kind!r}, pre={pre!r} is not supported (gpt2 "
            f"with smollm, gpt-2, llama-bpe or qwen2 is); use the Hugging Face folder"
        )
    tokens = f["tokens"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in f["merges"]],
            # Llama 3 takes a word that is a token whole, even if no merge makes it.
            ignore_merges=pre == "llama-bpe",
        )
    )
    tokenizer.pre_tokenizer = splitter  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    kinds = list(zip(tokens, f.get("token_type", ()), strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token, k in kinds if k == _CONTROL]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, k in kinds
            if k == _USER_DEFINED
        ]
    )
    bos, eos = (f.get(f"{end}_token_id") for end in ("bos", "eos"))
    return Text(
        tokenizer,
        template,
        "" if bos is None else tokens[bos],
        "" if eos is None else tokens[eos],
    )

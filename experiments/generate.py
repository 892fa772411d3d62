"""Answers a prompt, or chats, with a head; accepted draft tokens are shown in green.

python -m experiments.generate --head=DIR --prompt="Why is the sky blue?"
python -m experiments.generate --head=DIR              (chat; an empty line ends it)
"""

import time
from pathlib import Path

import jax
import numpy as np
from absl import flags

from eagle_jax import decode, heads, weights
from eagle_jax import text as text_lib
from eagle_jax.config import DecodeConfig
from experiments import common, evaluator
from experiments.common import Setup
from experiments.evaluator import Method

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "head",
    "",
    "Folder of a head; none decodes plainly; default: the shipped one, if it was trained "
    "for this target.",
)
flags.DEFINE_string("prompt", "", "One prompt to answer; empty starts a chat.")
flags.DEFINE_integer("max_new_tokens", 256, "Most new tokens per answer.")
flags.DEFINE_bool("color", True, "Show accepted draft tokens in green.")

GREEN, PLAIN_COLOR = "\033[32m", "\033[0m"


def main() -> None:
    cfg = common.load_config()
    if FLAGS.max_new_tokens < 1:
        raise ValueError(
            f"max_new_tokens must be at least 1, got {FLAGS.max_new_tokens}"
        )
    folder = None
    if FLAGS.head not in ("", "none"):
        folder = weights.resolve_head(FLAGS.head)
    setup = common.load_setup(cfg)
    folder = folder if FLAGS.head else shipped(setup)
    if folder:
        method = evaluator.load_method(setup, folder)
        print(f"head     {folder}")
    else:
        print("no head: plain decoding")
        method = Method(
            {"target": setup.target_params},
            DecodeConfig(setup.target_cfg, sampling=setup.cfg.sampling),
        )
    messages: list[dict[str, str]] = []
    while True:
        said = FLAGS.prompt or _ask()
        if not said:
            return
        messages.append({"role": "user", "content": said})
        reply = answer(setup, method, messages)
        messages.append({"role": "assistant", "content": reply})
        if FLAGS.prompt:
            return


def shipped(setup: Setup) -> Path | None:
    """Returns the head that comes with the project, if it belongs to this target."""
    folder = common.ROOT / "experiments" / "heads" / "eagle3"
    if not folder.exists():
        return None
    belongs = heads.load_head(folder).meta.get("target_hash") == setup.target_hash
    return folder if belongs else None


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def answer(setup: Setup, method: Method, messages: list[dict[str, str]]) -> str:
    """Streams one answer and prints what it took."""
    rendered = text_lib.render(setup.text, messages, add_generation_prompt=True)
    prompt = text_lib.encode(setup.text, rendered)
    params, cfg = method.params, method.cfg
    state = decode.start(
        params, [prompt], cfg, FLAGS.max_new_tokens, setup.cfg.seed, setup.cfg.max_len
    )
    jax.block_until_ready(state)
    tokens = [int(state.root[0])]
    screen = _Screen(setup)
    screen.show(tokens, 0)
    n_steps, n_timed, seconds = 0, 0, 0.0
    while not bool(state.done[0]) and len(tokens) < FLAGS.max_new_tokens:
        began = time.perf_counter()
        state, info = decode.jit_step(params, state, cfg)
        info = jax.device_get(info)
        n = min(int(info.n_emitted[0]), FLAGS.max_new_tokens - len(tokens))
        if n_steps:  # the first step compiles
            seconds += time.perf_counter() - began
            n_timed += n
        n_steps += 1
        new = np.asarray(info.tokens)[0, :n].tolist()
        tokens += new
        screen.show(new, int(info.n_accepted[0]))
    text = screen.end()
    tau = f"{(len(tokens) - 1) / n_steps:.2f}" if n_steps else "-"
    rate = f"{n_timed / seconds:.1f}" if seconds else "-"
    print(
        f"\n[{len(tokens)} tokens, {n_steps} steps, tau {tau}, {rate} tokens/s after "
        f"the first step]"
    )
    return text


class _Screen:
    """Prints tokens as they come, drafted ones in green.

    A character split over tokens waits until it is whole, or the answer ends.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup, self.tokens, self.shown = setup, [], ""

    def show(self, tokens: list[int], n_drafted: int) -> None:
        """Adds tokens, of which the first `n_drafted` were drafted and accepted."""
        for i, token in enumerate(tokens):
            self.tokens.append(token)
            text = text_lib.decode(self.setup.text, self.tokens)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                self._print(text, i < n_drafted)

    def end(self) -> str:
        """Prints what still waits, and returns the whole text."""
        text = text_lib.decode(self.setup.text, self.tokens)
        self._print(text, is_drafted=False)
        return text

    def _print(self, text: str, is_drafted: bool) -> None:
        new, self.shown = text[len(self.shown) :], text
        if new:
            colour = FLAGS.color and is_drafted
            print(f"{GREEN}{new}{PLAIN_COLOR}" if colour else new, end="", flush=True)


if __name__ == "__main__":
    common.run(main)

"""The target writes conversations to train its draft head on.

python -m experiments.synthesize --out=DIR --answer_tokens=300000 [--prompts=FILE]

They go to DIR/synthetic.jsonl; the same command goes on from there after an interruption.
"""

from collections.abc import Iterator
from pathlib import Path

import jax
from absl import flags

from eagle_jax import weights
from eagle_jax.config import DecodeConfig
from eagle_jax.data import Message
from experiments import common, evaluator, writer
from experiments.common import Setup
from experiments.evaluator import Method
from experiments.writer import Settings

FLAGS = flags.FLAGS
flags.DEFINE_integer("answer_tokens", 100_000, "Answer tokens to write, all together.")
flags.DEFINE_string(
    "prompts",
    "",
    "File or folder of prompts: FastChat JSONL, conversations, or text with one prompt a "
    "line; empty: the target makes them up.",
)
flags.DEFINE_string(
    "summarise",
    "",
    "Conversations whose long turns are put to the target to sum up, instead of prompts.",
)
flags.DEFINE_list("temperatures", ["0", "0.7", "1.0"], "Each gets an equal share.")
flags.DEFINE_integer("max_new_tokens", 384, "Most tokens of an answer.")
flags.DEFINE_integer("max_prompt_tokens", 120, "Drop longer prompts.")
flags.DEFINE_integer("min_tokens", 8, "Drop shorter answers.")
flags.DEFINE_bool("keep_cut", True, "Keep answers cut at --max_new_tokens.")
flags.DEFINE_integer("batch", 32, "Conversations decoded together.")
flags.DEFINE_string(
    "head", "", "Folder of a head to draft with; empty decodes plainly."
)


def main() -> None:
    cfg = common.load_config()
    settings = configure()
    read = None
    given = FLAGS.prompts or FLAGS.summarise
    if FLAGS.prompts and FLAGS.summarise:
        raise ValueError("give --prompts or --summarise, not both")
    if given and not Path(given).exists():
        raise ValueError(f"there is no {given!r} to read prompts from")
    if FLAGS.prompts:
        read = writer.read_prompts(Path(given))
    elif FLAGS.summarise:
        read = writer.summaries(Path(given), cfg.seed)
    folder = weights.resolve_head(FLAGS.head) if FLAGS.head else None
    depth = cfg.tree.depth if FLAGS.head else 0
    settings.slots(depth, cfg.max_len)  # says at once if there is no room
    files = writer.files_of(common.prepare_out())
    common.print_config(cfg)
    print(f"device   {common.describe_device()}, jax {jax.__version__}")
    setup = common.load_setup(cfg)
    print(
        f"target   {setup.target_cfg.name}, hash {setup.target_hash}, {cfg.precision}"
    )
    hashed = writer.hash_prompts(read) if read else "written by the target"
    writer.check_meta(files, writer.meta_of(setup, settings, hashed))
    if folder:
        method = evaluator.load_method(setup, folder)
    else:
        method = Method(
            {"target": setup.target_params},
            DecodeConfig(setup.target_cfg, sampling=cfg.sampling),
        )
    prompts = writer.Prompts(setup, settings, source(setup, settings, files, read))
    task = writer.Writer(setup, method, settings, prompts, files)
    task.run()
    report(task)


def configure() -> Settings:
    """Reads the flags, before anything slow."""
    try:
        temperatures = tuple(map(float, FLAGS.temperatures))
    except ValueError:
        raise ValueError(
            f"temperatures must be numbers with commas between, got "
            f"{','.join(FLAGS.temperatures)!r}"
        ) from None
    return Settings(
        answer_tokens=FLAGS.answer_tokens,
        temperatures=temperatures,
        max_new_tokens=FLAGS.max_new_tokens,
        max_prompt_tokens=FLAGS.max_prompt_tokens,
        min_tokens=FLAGS.min_tokens,
        keep_cut=FLAGS.keep_cut,
        batch=FLAGS.batch,
    )


def source(
    setup: Setup,
    settings: Settings,
    files: writer.Files,
    read: list[tuple[list[Message], str]] | None,
) -> Iterator[tuple[list[Message], str, str]]:
    """Yields messages, where they come from, and why they are no good, or ""."""
    if read is not None:
        yield from ((messages, where, "") for messages, where in read)
        return
    for prompt, reason in writer.write_prompts(setup, settings, files.prompts):
        yield [{"role": "user", "content": prompt}], "target", reason


def report(task: writer.Writer) -> None:
    """Prints what was kept, and what was dropped and why, in all runs together."""
    total, wanted = sum(task.n_tokens), task.settings.answer_tokens
    print(f"\n{task.n_kept} conversations with {total} answer tokens are in")
    print(f"  {task.files.conversations}")
    pairs = zip(task.settings.temperatures, task.n_tokens, strict=True)
    for temperature, n in pairs:
        print(f"{n:8d}  answer tokens at temperature {temperature:g}")
    for reason, n in [*task.prompts.dropped.most_common(), *task.dropped.most_common()]:
        print(f"{n:8d}  dropped: {reason}")
    if any(n < task.share(group) for group, n in enumerate(task.n_tokens)):
        print(f"The prompts ran out before {wanted} answer tokens; give more of them.")


if __name__ == "__main__":
    common.run(main)

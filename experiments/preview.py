"""Shows what training would see: text, the part that is trained, shares and coverage.

python -m experiments.preview --data=chats.jsonl [--set=target_source=DIR]
"""

from pathlib import Path

from absl import flags

from eagle_jax import data
from experiments import common, trainer

FLAGS = flags.FLAGS
flags.DEFINE_multi_string(
    "data", [], "Conversations to show; default: embedded.", allow_override=True
)
flags.DEFINE_integer("samples", 3, "Conversations to print.")


def main() -> None:
    """Prints the first conversations with the trained part in ⟦ ⟧, and totals."""
    if FLAGS.samples < 0:
        raise ValueError(f"samples must be 0 or more, got {FLAGS.samples}")
    cfg = common.load_config()
    setup = common.load_setup(cfg)
    paths = tuple(map(Path, FLAGS.data)) or trainer.TRAINING_DATA
    samples = trainer.read_samples(setup, paths)
    for sample in samples[: FLAGS.samples]:
        print(f"\n{data.preview(setup.text, sample)}")
    kept, held_out = data.split(samples, cfg.train.held_out, cfg.seed)
    tokens = sum(len(s.tokens) for s in samples)
    supervised = sum(int(s.mask.sum()) for s in samples)
    print(
        f"\nall {len(samples)}: {tokens} tokens, {supervised} of them supervised "
        f"({supervised / tokens:.1%})"
    )
    vocab_size = setup.target_cfg.vocab_size
    for size in sorted({*(2**k for k in range(10, 17)), cfg.draft.vocab_size}):
        if 0 < size <= vocab_size:
            ids = data.draft_vocabulary(kept, vocab_size, size)
            covered = data.coverage(held_out, ids)
            ours = "  (draft.vocab_size)" if size == cfg.draft.vocab_size else ""
            print(
                f"draft vocabulary {size} covers {covered:.1%} of held-out answers{ours}"
            )


if __name__ == "__main__":
    common.run(main)

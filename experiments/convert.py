"""Converts draft heads between published formats, and checks what a folder holds.

python -m experiments.convert --check=DIR [--target=DIR] [--reader=vllm]
python -m experiments.convert --head=DIR --target=smollm2 --to=speculators --out=DIR
"""

from pathlib import Path

from absl import flags

from eagle_jax import heads, weights
from experiments import common

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "check", None, "Head to describe: folder, .safetensors or .bin file, or hub name."
)
flags.DEFINE_enum(
    "reader", None, heads.READERS, "Only what this reader makes of --check."
)
flags.DEFINE_string("head", None, "Head to convert, named in the same ways.")
flags.DEFINE_enum(
    "to", None, list(heads.LAYOUTS), "Format to write into the folder --out."
)
flags.DEFINE_string(
    "target", None, 'Target of the head: "smollm2", a folder, .gguf file or hub name.'
)
flags.DEFINE_list("taps", None, "Layers whose inputs the head reads, such as 2,16,29.")
flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Type of written weights."
)
flags.DEFINE_bool("overwrite", False, "Replace a head that is in --out.")


def check(taps: tuple[int, ...] | None) -> None:
    """Prints what is inside, and what each reader would ignore or refuse (!)."""
    target = None
    if FLAGS.target:
        target, _ = weights.load_target(
            weights.resolve(FLAGS.target), "float32", taps or ()
        )
    print(heads.report(weights.resolve_head(FLAGS.check), FLAGS.reader, target, taps))


def convert(taps: tuple[int, ...] | None) -> None:
    """Reads, writes, reads again, and prints what is doubtful."""
    if not (FLAGS.target and FLAGS.to and FLAGS["out"].present):
        raise ValueError(
            "--head needs --target (smollm2 for the default one), --to and --out as well"
        )
    source = weights.resolve(FLAGS.target)
    target, params = weights.load_target(source, "float32", taps or ())
    head = heads.load_head(weights.resolve_head(FLAGS.head), target, taps)
    recorded, present = head.meta.get("target_hash"), weights.target_hash(source)
    if recorded not in (None, present):
        print(f"note: recorded for target {recorded}, this one is {present}")
    doubts = heads.save_head(
        FLAGS.out,
        head.cfg,
        head.params,
        head.taps,
        FLAGS.to,
        FLAGS.dtype,
        meta=head.meta,
        target=target,
        embed=params["embed"],
        overwrite=FLAGS.overwrite,
    )
    heads.load_head(Path(FLAGS.out), target)
    for note in head.notes + doubts:
        print(f"note: {note}")
    print(f"{FLAGS.out}: {head.cfg.head} head written for {FLAGS.to}")


def main() -> None:
    """Checks or converts, as the flags say."""
    if (FLAGS.check is None) == (FLAGS.head is None):
        raise ValueError(
            "give --check=DIR, or --head=DIR --target=DIR --to=... --out=DIR"
        )
    try:
        taps = tuple(int(tap) for tap in FLAGS.taps) if FLAGS.taps else None
    except ValueError as error:
        raise ValueError(f"--taps needs layer numbers, got {FLAGS.taps}") from error
    (check if FLAGS.check else convert)(taps)


if __name__ == "__main__":
    common.run(main)

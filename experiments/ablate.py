"""Trains (or loads) the head of one variant and measures it against plain decoding.

python -m experiments.ablate --variant=eagle3 [--preset=smoke|quick|full]
"""

import dataclasses
import hashlib
import shlex
from pathlib import Path
from typing import Any

import jax
from absl import flags
from rich.console import Console
from rich.table import Table

from eagle_jax import data
from eagle_jax.config import Config, DecodeConfig, fingerprint
from eagle_jax.data import Question
from experiments import common, evaluator, trainer
from experiments.common import Progress, Setup
from experiments.evaluator import Method, TaskResult

FLAGS = flags.FLAGS
flags.DEFINE_string("variant", "eagle3", "What to measure; see VARIANTS.")
flags.DEFINE_string("preset", "quick", "How much to train and to measure; see PRESETS.")
flags.DEFINE_string(
    "questions", "", "Folder of FastChat JSONL sets; default: embedded."
)
flags.DEFINE_multi_string("data", [], "Conversations to train on; default: embedded.")
flags.DEFINE_string("head", "", "Folder of a head to measure instead of training one.")
flags.DEFINE_integer("prompts_per_set", 0, "Prompts of each set; 0: the preset's.")
flags.DEFINE_integer("max_new_tokens", 0, "New tokens per answer; 0: the preset's.")
flags.DEFINE_float("temperature", None, "0 is greedy; default: the config's.")
flags.DEFINE_integer("batch", 1, "Prompts decoded together.")
flags.DEFINE_bool("retrain", False, "Train even if the head is there.")
flags.DEFINE_bool("force", False, "Measure even if the result line is there.")

VARIANTS = {"vanilla": "none", "eagle3": "eagle3"}  # variant: kind of head
QUESTIONS = common.ROOT / "experiments" / "data" / "questions"


@dataclasses.dataclass(frozen=True)
class Preset:
    supervised_tokens: int
    prompts_per_set: int
    max_new_tokens: int


PRESETS = {
    "smoke": Preset(supervised_tokens=4_000, prompts_per_set=1, max_new_tokens=32),
    "quick": Preset(supervised_tokens=100_000, prompts_per_set=3, max_new_tokens=64),
    "full": Preset(supervised_tokens=1_500_000, prompts_per_set=80, max_new_tokens=128),
}


def main() -> None:
    cfg, preset = configure()
    questions = read_questions(preset)
    out = common.prepare_out()
    common.print_config(cfg)
    print(f"device   {common.describe_device()}, jax {jax.__version__}")
    setup = common.load_setup(cfg)
    print(f"target   {setup.target_cfg.name}, hash {setup.target_hash}, {cfg.dtype}")
    evaluator.check_prompts(setup, questions, preset.max_new_tokens)
    plain = Method(
        {"target": setup.target_params},
        DecodeConfig(setup.target_cfg, sampling=cfg.sampling),
    )
    method, folder = plain, None
    if VARIANTS[FLAGS.variant] != "none":
        folder = Path(FLAGS.head) if FLAGS.head else get_head(setup, out)
        method = evaluator.load_method(setup, folder)
        if method.cfg.draft.head != VARIANTS[FLAGS.variant]:
            raise ValueError(
                f"{folder} holds a head of kind {method.cfg.draft.head}, "
                f"--variant={FLAGS.variant} needs {VARIANTS[FLAGS.variant]}"
            )
    rows = measure(setup, method, plain, questions, preset, folder, out)
    print_table(rows, method.cfg.tree.depth)
    warn_of_wiring(rows, method.cfg)
    if folder is not None:
        flags_used = common.used_flags()
        print(f"\nThe head is in {folder}. To talk to the target with it:")
        print(
            f"  python -m experiments.generate{flags_used} "
            f'--head={shlex.quote(str(folder))} --prompt="..."'
        )


def configure() -> tuple[Config, Preset]:
    """Reads all flags, before anything slow."""
    if FLAGS.variant not in VARIANTS:
        raise ValueError(
            f"no variant {FLAGS.variant!r}; there are {', '.join(VARIANTS)}"
        )
    if FLAGS.preset not in PRESETS:
        raise ValueError(f"no preset {FLAGS.preset!r}; there are {', '.join(PRESETS)}")
    preset = PRESETS[FLAGS.preset]
    cfg = common.load_config()
    if not any(text.startswith("train.supervised_tokens=") for text in FLAGS.set):
        train = dataclasses.replace(
            cfg.train, supervised_tokens=preset.supervised_tokens
        )
        cfg = dataclasses.replace(cfg, train=train)
    if FLAGS.temperature is not None:
        sampling = dataclasses.replace(cfg.sampling, temperature=FLAGS.temperature)
        cfg = dataclasses.replace(cfg, sampling=sampling)
    if FLAGS.prompts_per_set:
        preset = dataclasses.replace(preset, prompts_per_set=FLAGS.prompts_per_set)
    if FLAGS.max_new_tokens:
        preset = dataclasses.replace(preset, max_new_tokens=FLAGS.max_new_tokens)
    if FLAGS.batch < 1 or preset.prompts_per_set < 1 or preset.max_new_tokens < 2:
        raise ValueError(
            "batch and prompts_per_set must be at least 1, max_new_tokens at least 2"
        )
    if FLAGS.head and (VARIANTS[FLAGS.variant] == "none" or FLAGS.retrain):
        raise ValueError(
            "--head measures a head that is there: it goes neither with "
            "--variant=vanilla nor with --retrain"
        )
    for path in [*FLAGS.data, *filter(None, [FLAGS.head])]:
        if not Path(path).exists():
            raise ValueError(f"there is no {path!r}")
    return cfg, preset


def read_questions(preset: Preset) -> dict[str, list[Question]]:
    """Reads the sets and takes the first prompts of each."""
    path = Path(FLAGS.questions or QUESTIONS)
    if not path.exists():
        raise ValueError(f"there is no {str(path)!r} to read questions from")
    sets = data.read_questions(path)
    return {task: rows[: preset.prompts_per_set] for task, rows in sets.items()}


def get_head(setup: Setup, out: Path) -> Path:
    """Returns the folder of this variant's head, trained first if it is not there."""
    paths = tuple(map(Path, FLAGS.data)) or trainer.TRAINING_DATA
    kind = VARIANTS[FLAGS.variant]
    job = trainer.plan(setup, FLAGS.variant, kind, paths, out)
    if job.head.exists() and not FLAGS.retrain:
        print(f"head     {job.head} is there and is used; --retrain trains it again")
        return job.head
    return trainer.fit(job, FLAGS.retrain)


def measure(
    setup: Setup,
    method: Method,
    plain: Method,
    questions: dict[str, list[Question]],
    preset: Preset,
    folder: Path | None,
    out: Path,
) -> list[dict[str, Any]]:
    """Measures every set whose line is not in the results yet; returns all lines."""
    cfg, path = setup.cfg, out / "results.jsonl"
    known = {row.get("fingerprint"): row for row in common.read_lines(path)}
    head_hash = _head_hash(folder) if folder else None
    greedy = cfg.sampling.temperature == 0
    shared = {
        "variant": FLAGS.variant,
        "target": setup.target_cfg.name,
        "questions": Path(FLAGS.questions).resolve().name
        if FLAGS.questions
        else "embedded",
        "preset": FLAGS.preset,
        "temperature": cfg.sampling.temperature,
        "max_new_tokens": preset.max_new_tokens,
        "batch": FLAGS.batch,
        "dtype": cfg.dtype,
        "tree": dataclasses.asdict(method.cfg.tree),
        "head": head_hash,
        "config": dataclasses.asdict(cfg),
        "seed": cfg.seed,
        "device": common.describe_device(),
    }
    names = {
        task: fingerprint(shared, setup.target_hash, task, [list(q) for q in asked])
        for task, asked in questions.items()
    }
    todo = [task for task in questions if FLAGS.force or names[task] not in known]
    for task in questions:
        if task not in todo:
            print(f"{task}: result is in {path} and is used; --force measures again")
    progress = Progress("decode", sum(len(questions[task]) for task in todo))
    done = 0
    for task in todo:
        result = evaluator.run_task(
            setup,
            method,
            plain,
            task,
            questions[task],
            preset.max_new_tokens,
            FLAGS.batch,
            progress,
            done,
        )
        done += len(questions[task])
        report_mismatches(result)
        row = shared | {"task": task}
        row |= evaluator.summary(result, method.cfg.tree.depth, greedy)
        row |= {"fingerprint": names[task], "commit": common.commit()}
        common.append_line(path, row)
        known[names[task]] = row
    return [known[names[task]] for task in questions]


def report_mismatches(result: TaskResult) -> None:
    for line in result.mismatches:
        print(f"NOT IDENTICAL to plain decoding: {line}")


def _head_hash(head: Path) -> str:
    """Names the weights of a head: its .safetensors file, else all files there."""
    files = [head] if head.is_file() else sorted(head.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files or sorted(path for path in head.iterdir() if path.is_file()):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def print_table(rows: list[dict[str, Any]], depth: int) -> None:
    """Prints one line per set, their pooled mean, and what the columns mean."""
    first = rows[0]
    table = Table(
        title=(
            f"{first['variant']} on {first['target']}, temperature "
            f"{first['temperature']}, {first['max_new_tokens']} new tokens, "
            f"batch {first['batch']}, {first['dtype']}, "
            f"tree of {first['tree']['n_nodes']} nodes"
        )
    )
    columns = ["task", "tau pooled", "by prompt", "no loops", "accepted by depth"]
    columns += [
        "tokens/s",
        "speedup",
        "with prefill",
        "identical",
        "near ties",
        "loops",
    ]
    for column in columns:
        table.add_column(column, justify="left" if column == "task" else "right")
    for row in [*rows, mean_row(rows, depth)]:
        n = row["n_prompts"]
        exact = row["n_identical"] is not None
        table.add_row(
            row["task"],
            _number(row["tau_pooled"]),
            _number(row["tau_by_prompt"]),
            _number(row["tau_without_loops"]),
            " ".join(_number(a) for a in row["acceptance_by_depth"]),
            _number(row["tokens_per_second"], 1),
            _number(row["speedup"]),
            _number(row["speedup_with_prefill"]),
            f"{row['n_identical']} of {n}" if exact else "-",
            str(row["n_near_tie"]) if exact else "-",
            f"{row['n_looping']} of {n}",
        )
    console = Console(width=None if Console().is_terminal else 150)
    console.print(table)
    console.print(
        "tau: tokens per step, bonus token counted (pooled over steps; mean of "
        "prompts; pooled without answers that loop).\n"
        "accepted by depth: share of steps accepting at least 1, 2, ... drafted "
        "tokens. speedup: ratio of mean tokens/s, plain\n"
        "decoding in the same run; compilation and warm-up are never counted. The last "
        "line averages the sets."
    )


def warn_of_wiring(rows: list[dict[str, Any]], cfg: DecodeConfig) -> None:
    """Says so if hardly a draft is accepted: a head that is wired right does better."""
    accepted = mean_row(rows, cfg.tree.depth)["acceptance_by_depth"][:1]
    if accepted and accepted[0] is not None and accepted[0] < 0.05:
        print(
            f"\nWARNING: only {accepted[0]:.1%} of the steps accepted a drafted token. Is "
            f"the head trained well, for this target and its chat template, on the inputs "
            f"of layers {cfg.target.taps}? experiments.convert --check=HEAD lists doubts; "
            f"--set=taps=[...] sets the layers of a head that names none."
        )


def mean_row(rows: list[dict[str, Any]], depth: int) -> dict[str, Any]:
    """Averages the sets; counts are added up."""

    def mean(values: list[float | None]) -> float | None:
        real = [v for v in values if v is not None]
        return sum(real) / len(real) if real else None

    counts = ("n_prompts", "n_looping", "n_identical", "n_near_tie")
    exact = all(row["n_identical"] is not None for row in rows)
    total: dict[str, Any] = {"task": "mean"}
    for key in counts:
        usable = exact or key in ("n_prompts", "n_looping")
        total[key] = sum(row[key] for row in rows) if usable else None
    for key in (
        "tau_pooled",
        "tau_by_prompt",
        "tau_without_loops",
        "tokens_per_second",
        "speedup",
        "speedup_with_prefill",
    ):
        total[key] = mean([row[key] for row in rows])
    total["acceptance_by_depth"] = [
        mean([row["acceptance_by_depth"][d] for row in rows]) for d in range(depth)
    ]
    return total


def _number(x: float | None, digits: int = 2) -> str:
    return "-" if x is None else f"{x:.{digits}f}"


if __name__ == "__main__":
    common.run(main)

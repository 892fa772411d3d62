"""Trains (or loads) the head of one variant and measures it against plain decoding.

python -m experiments.ablate --variant=eagle3 [--preset=smoke|quick|full]
"""

import dataclasses
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import flags
from rich.console import Console
from rich.table import Table

from eagle_jax import data, heads, sharding, weights
from eagle_jax.config import Config, DecodeConfig, fingerprint
from eagle_jax.data import Question, Sample
from experiments import common, evaluator, probe, trainer, variants
from experiments.common import Progress, Setup
from experiments.evaluator import Method, TaskResult
from experiments.variants import Variant

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "variant", "eagle3", "What to measure: names of variants.py with commas, or all."
)
flags.DEFINE_string("preset", "quick", "How much to train and to measure; see PRESETS.")
flags.DEFINE_string(
    "questions", "", "Folder of FastChat JSONL sets; default: embedded."
)
flags.DEFINE_multi_string("data", [], "Conversations to train on; default: embedded.")
flags.DEFINE_multi_string(
    "fixed_data", [], "Conversations people wrote, for variants that end in _fixed."
)
flags.DEFINE_string("head", "", "Folder of a head to measure instead of training one.")
flags.DEFINE_string(
    "start_from", "", "Folder of a head to go on training from, with a new schedule."
)
flags.DEFINE_integer("prompts_per_set", 0, "Prompts of each set; 0: the preset's.")
flags.DEFINE_integer("max_new_tokens", 0, "New tokens per answer; 0: the preset's.")
flags.DEFINE_float("temperature", None, "0 is greedy; default: the config's.")
flags.DEFINE_integer("batch", 1, "Prompts decoded together.")
flags.DEFINE_integer(
    "probe",
    0,
    "Prompts of each set that are decoded once more, step by step, for calibration, tree "
    "shapes and the cost of a step's parts.",
)
flags.DEFINE_bool("retrain", False, "Train even if the head is there.")
flags.DEFINE_bool("fsdp", False, "Cut trained parameters over data as well as model.")
flags.DEFINE_bool("force", False, "Measure even if the result line is there.")


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
    cfg, preset, chosen = configure()
    questions = read_questions(preset)
    out = common.prepare_out()
    common.print_config(cfg)
    print(f"device   {common.describe_device()}, jax {jax.__version__}")
    setup = common.load_setup(cfg)
    print(
        f"target   {setup.target_cfg.name}, hash {setup.target_hash}, {cfg.precision}"
    )
    evaluator.check_prompts(setup, questions, preset.max_new_tokens)
    plain = evaluator.plain_method(setup)
    paths = {
        False: tuple(map(Path, FLAGS.data)) or trainer.TRAINING_DATA,
        True: tuple(map(Path, FLAGS.fixed_data)),
    }
    samples: dict[bool, list[Sample]] = {}  # read when the first head asks for them
    entries = []
    for variant in chosen:
        folder, method = None, plain
        if variant.name == "vanilla_twice":
            method = plain._replace(copies=2)
        if variant.head["head"] != "none":
            if variant.trained_as:
                fixed = variant.fixed
                if FLAGS.head:
                    folder = weights.resolve_head(FLAGS.head)
                else:
                    if fixed not in samples:
                        samples[fixed] = trainer.read_samples(setup, paths[fixed])
                    folder = get_head(setup, variant, samples[fixed], out)
            tree = variants.tree_of(variant, cfg)
            method = evaluator.load_method(setup, folder, tree)
            check_kind(variant, method, folder)
        entries.append(Entry(variant.name, method, folder))
    rows = measure(setup, entries, plain, questions, preset, out)
    for entry in entries:
        own = [row for row in rows if row["variant"] == entry.variant]
        print_table(own, entry.method.cfg.tree.depth)
        warn_of_wiring(own, entry.method.cfg)
    if len(entries) > 1:
        print_variants(rows)
    for folder in dict.fromkeys(entry.folder for entry in entries if entry.folder):
        flags_used = common.used_flags()
        print(f"\nThe head is in {folder}. To talk to the target with it:")
        print(
            f"  python -m experiments.generate{flags_used} "
            f'--head={shlex.quote(str(folder))} --prompt="..."'
        )


class Entry(NamedTuple):
    """A variant ready to be measured, and the folder of its head, if it has one."""

    variant: str
    method: Method
    folder: Path | None


def check_kind(variant: Variant, method: Method, folder: Path | None) -> None:
    """Refuses a head of another kind than the variant's."""
    head = method.cfg.draft
    differ = {k: v for k, v in variant.head.items() if getattr(head, k) != v}
    if differ and FLAGS.head:
        raise ValueError(
            f"{folder} holds a head of kind {head.head} (inputs={head.inputs}, feature="
            f"{head.feature}), --variant={variant.name} needs {variant.head}"
        )


def configure() -> tuple[Config, Preset, list[Variant]]:
    """Reads all flags, before anything slow."""
    names = variants.ALL if FLAGS.variant == "all" else FLAGS.variant.split(",")
    chosen = [variants.parse(name) for name in dict.fromkeys(names)]
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
    if FLAGS.probe < 0 or (FLAGS.probe and jax.process_count() > 1):
        raise ValueError(
            f"probe must be 0 or more, and 0 in several processes, got {FLAGS.probe}"
        )
    if FLAGS.batch < 1 or preset.prompts_per_set < 1 or preset.max_new_tokens < 2:
        raise ValueError(
            "batch and prompts_per_set must be at least 1, max_new_tokens at least 2"
        )
    trained = {variant.trained_as for variant in chosen} - {""}
    if FLAGS.head and (len(trained) != 1 or FLAGS.retrain):
        raise ValueError(
            "--head measures a head that is there: it goes neither with --retrain nor "
            f"with variants of other heads or of none, got --variant={FLAGS.variant}"
        )
    if FLAGS.start_from and len(trained) != 1:
        raise ValueError("--start_from goes with variants of one trained head")
    if any(variant.fixed for variant in chosen) and not (
        FLAGS.fixed_data or FLAGS.head
    ):
        raise ValueError(
            "variants that end in _fixed train on answers people wrote; name a file of "
            "them with --fixed_data"
        )
    for path in [*FLAGS.data, *FLAGS.fixed_data]:
        if not Path(path).exists():
            raise ValueError(f"there is no {path!r}")
    for head in filter(None, [FLAGS.head, FLAGS.start_from]):
        weights.resolve_head(head)
    for variant in chosen:  # a tree or a setting that does not fit is told at once
        variants.apply(variant, cfg)
    return cfg, preset, chosen


def read_questions(preset: Preset) -> dict[str, list[Question]]:
    """Reads the sets and takes the first prompts of each."""
    path = Path(FLAGS.questions or evaluator.QUESTIONS)
    if not path.exists():
        raise ValueError(f"there is no {str(path)!r} to read questions from")
    sets = data.read_questions(path)
    return {task: rows[: preset.prompts_per_set] for task, rows in sets.items()}


def get_head(setup: Setup, variant: Variant, samples: list[Sample], out: Path) -> Path:
    """Returns the folder of a variant's head, trained first if it is not there."""
    start_from = weights.resolve_head(FLAGS.start_from) if FLAGS.start_from else None
    job = trainer.plan(setup, variant, samples, out, start_from)
    if job.head.exists() and not (FLAGS.retrain and job.head not in _trained):
        print(f"head     {job.head} is there and is used; --retrain trains it again")
        return job.head
    _trained.add(job.head)
    return trainer.fit(job, FLAGS.retrain, FLAGS.fsdp)


_trained: set[Path] = set()  # by this run: variants that share a head train it once


def measure(
    setup: Setup,
    entries: list[Entry],
    plain: Method,
    questions: dict[str, list[Question]],
    preset: Preset,
    out: Path,
) -> list[dict[str, Any]]:
    """Measures every variant and set whose line is not there yet; returns all lines."""
    path = out / "results.jsonl"
    known = {row.get("fingerprint"): row for row in common.read_lines(path)}
    lines = {entry.variant: _line(setup, entry, preset) for entry in entries}
    names = {
        (entry.variant, task): fingerprint(
            lines[entry.variant], setup.target_hash, task, [list(q) for q in asked]
        )
        for entry in entries
        for task, asked in questions.items()
    }
    todo = {
        task: [e for e in entries if FLAGS.force or names[e.variant, task] not in known]
        for task in questions
    }
    for task, missing in todo.items():
        for entry in entries:
            if entry not in missing:
                print(
                    f"{entry.variant}, {task}: result is in {path} and is used; --force "
                    f"measures again"
                )
    n_asked = sum(len(questions[task]) for task, missing in todo.items() if missing)
    progress, done = Progress("decode", n_asked), 0
    for task, missing in todo.items():
        if not missing:
            continue
        due = [names[entry.variant, task] for entry in missing]
        answered = out / "answers" / f"{fingerprint(due)}.jsonl"
        if FLAGS.force and sharding.is_first():
            answered.unlink(missing_ok=True)
        sharding.wait("old answers removed")
        results = evaluator.run_task(
            setup,
            [entry.method for entry in missing],
            plain,
            task,
            questions[task],
            preset.max_new_tokens,
            FLAGS.batch,
            progress,
            done,
            answered,
        )
        done += len(questions[task])
        rows = []
        for entry, result in zip(missing, results, strict=True):
            report_mismatches(entry.variant, result)
            row = lines[entry.variant] | {"task": task}
            row |= evaluator.summary(result, entry.method.cfg)
            row |= _probed(setup, entry.method, questions[task], preset)
            name = names[entry.variant, task]
            row |= {"fingerprint": name, "commit": common.commit()}
            row |= {"jax": jax.__version__}
            rows.append(row)
        for row in rows:  # all at once: what is due names the file of the kept answers
            common.append_line(path, row)
            known[row["fingerprint"]] = row
        if sharding.is_first():
            answered.unlink()
    return [
        known[names[entry.variant, task]] for entry in entries for task in questions
    ]


def _probed(
    setup: Setup, method: Method, questions: list[Question], preset: Preset
) -> dict[str, Any]:
    prompts = [evaluator.first_prompt(setup, q) for q in questions[: FLAGS.probe]]
    if not prompts:
        return {}
    evaluator.make_room()
    found = probe.trees(method, prompts, preset.max_new_tokens, setup.cfg.seed)
    return found | (probe.costs(method, prompts[0]) if FLAGS.batch == 1 else {})


def _line(setup: Setup, entry: Entry, preset: Preset) -> dict[str, Any]:
    """What a result line says before anything is measured."""
    cfg, folder = setup.cfg, entry.folder
    return {
        "variant": entry.variant,
        "target": setup.target_cfg.name,
        "questions": Path(FLAGS.questions).resolve().name
        if FLAGS.questions
        else "embedded",
        "preset": FLAGS.preset,
        "temperature": cfg.sampling.temperature,
        "max_new_tokens": preset.max_new_tokens,
        "batch": FLAGS.batch,
        "dtype": cfg.precision,
        "tree": dataclasses.asdict(entry.method.cfg.tree),
        "head": heads.head_hash(folder) if folder else None,
        **_training(folder),
        "config": dataclasses.asdict(cfg),
        "seed": cfg.seed,
        "device": common.describe_device(),
    }


def _training(folder: Path | None) -> dict[str, Any]:
    """What a head says about its training; null where it says nothing."""
    meta = heads.load_head(folder).meta if folder else {}
    return {
        "n_trainable": meta.get("n_trainable"),
        "train_flops": meta.get("train_flops"),
        "trained_tokens": meta.get("supervised_tokens"),
        "learning_curve": meta.get("learning_curve"),
    }


def report_mismatches(variant: str, result: TaskResult) -> None:
    for line in result.mismatches:
        print(f"NOT IDENTICAL to plain decoding: {variant}, {line}")


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


def print_variants(rows: list[dict[str, Any]]) -> None:
    """Prints one line per variant: means over the sets."""
    table = Table(title="means over the sets")
    columns = ["variant", "trained", "tau pooled", "speedup", "with prefill", "alpha"]
    for column in [*columns, "identical"]:
        table.add_column(column, justify="left" if column == "variant" else "right")
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == variant]
        depth = len(own[0]["acceptance_by_depth"])
        mean = mean_row(own, depth)
        size = own[0].get("n_trainable")
        chains = [row["alpha"] for row in own if row.get("alpha")]
        alpha = [sum(a) / len(a) for a in zip(*chains, strict=True) if None not in a]
        exact = mean["n_identical"] is not None
        table.add_row(
            variant,
            f"{size / 1e6:.1f}M" if size else "-",
            _number(mean["tau_pooled"]),
            _number(mean["speedup"]),
            _number(mean["speedup_with_prefill"]),
            " ".join(_number(a) for a in alpha) or "-",
            f"{mean['n_identical']} of {mean['n_prompts']}" if exact else "-",
        )
    Console(width=None if Console().is_terminal else 150).print(table)


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
    common.run(main, alone=False)

"""The runs behind the results: a list of commands, each of which goes on where it stopped.

    python -m experiments.study --study=variants --questions=DIR
    python -m experiments.report --results=out

`variants` compares all variants at one budget, `sweeps` changes one number at a time,
`heads` trains those for use, and `batches` decodes with one that is here in batches of 1 to
16. A run that was made is not made again; --list shows them all.
"""

import shlex
import subprocess
import sys

from absl import flags

from experiments import ablate, common, variants  # ablate's flags are handed on

FLAGS = flags.FLAGS
flags.DEFINE_enum(
    "study", "variants", ["variants", "sweeps", "heads", "batches"], "Which runs."
)
flags.DEFINE_bool("list", False, "Only print the commands.")

# Given by the user, they go to every run, behind what a study says itself.
HANDED_ON = ("config", "set", "out", "mesh", "data", "fixed_data", "questions", "batch")
HANDED_ON += ("prompts_per_set", "max_new_tokens", "temperature")
SHIPPED = common.ROOT / "experiments" / "heads" / "eagle3"
DATA = common.ROOT / "experiments" / "data"
EMBEDDED = (DATA / "train.jsonl.gz", DATA / "synthetic.jsonl.gz")


def settings(**fields: object) -> list[str]:
    """Returns --set flags; a double underscore stands for the dot."""
    return [f"--set={k.replace('__', '.')}={v}" for k, v in fields.items()]


def larger(width: int, depth: int, n_nodes: int) -> list[str]:
    """A tree for studies of tau, where the default config's is what pays on a CPU."""
    if FLAGS["config"].present:
        return []
    return settings(tree__width=width, tree__depth=depth, tree__n_nodes=n_nodes)


def of_variants(fixed: bool) -> list[list[str]]:
    """All variants on the same tokens, and with the nodes of EAGLE-1's static tree.

    Parts of a method (trees without a part, training data) and most chains at temperature 0
    only.
    """
    given = settings(train__features="stored", train__supervised_tokens=100_000)
    # Seven wide: 26 nodes are expanded, as many as are verified.
    given += settings(tree__width=7, tree__depth=4, tree__n_nodes=26)
    given += ["--prompts_per_set=10", "--max_new_tokens=128", "--probe=1"]
    more = "eagle1_no_noise" + ",eagle1_fixed" * fixed
    named = [name for name in variants.BASES if name != "vanilla_twice"]
    # EAGLE-1's Table 2 and EAGLE-2's Table 1 have these at temperature 1.
    named += ["eagle1_chain", "small_draft_chain"]
    return [
        [f"--variant={chosen}", *given, f"--temperature={temperature}"]
        for chosen, temperature in (("all", 0), (more, 0), (",".join(named), 1))
    ]


def of_sweeps() -> list[list[str]]:
    """Unrolled steps, taps, norms, losses, data and depth of the chain, one at a time."""
    # Tau does not depend on the batch, and 64 tokens in one pass are cheaper than four
    # times 16 (results/bench.jsonl); for chains speed counts as well.
    base = ["--prompts_per_set=8", "--max_new_tokens=64", "--batch=4"]
    base += larger(6, 4, 16)
    alone = ["--prompts_per_set=5", "--max_new_tokens=64"]
    stored = settings(train__features="stored")
    small = [*base, *stored, *settings(train__supervised_tokens=20_000)]
    steps = [f"eagle3_ttt{i}{tree}" for i in range(1, 8) for tree in ("", "_chain")]
    runs = [[f"--variant={','.join(steps)}", *small]]
    runs += [
        ["--variant=eagle3", *small, *settings(taps=f"[{','.join(map(str, taps))}]")]
        for taps in ((2,), (15,), (27,), (2, 15), (15, 27), (7, 15, 23))
    ]
    # The norms of EAGLE-3.1 and other choices in which implementations differ.
    runs += [
        ["--variant=eagle3", *small, f"--set={choice}"]
        for choice in (
            *("draft.norm_output=true", "draft.fc_norm=true"),
            *("draft.norm_before_fc=true", "draft.norm_before_residual=true"),
            *("train.mask=official", "train.normaliser=slots"),
            "train.head_from_target=false",
        )
    ]
    runs += [
        ["--variant=eagle3", *base, *stored, *settings(train__supervised_tokens=n)]
        for n in (12_500, 25_000, 50_000, 100_000)
    ]
    # EAGLE-1's input study once more, on four times the tokens of all variants' budget,
    # all distinct: does the order of its Figure 4 come with training?
    inputs = "token,feature,eagle1"
    chains = ",".join(f"{name}_chain" for name in inputs.split(","))
    more = settings(train__supervised_tokens=400_000)
    if not FLAGS["data"].present:
        more += [f"--data={path}" for path in EMBEDDED]
    runs.append([f"--variant={inputs},{chains}", *base, *stored, *more])
    if not FLAGS["config"].present:
        # The last point of the curve of data: the head that comes with the project.
        runs.append([f"--head={SHIPPED}", *base, *stored])
    deepest = settings(train__supervised_tokens=100_000)
    runs += [
        [
            *("--variant=eagle3", *alone, *stored, *deepest),
            *settings(tree__width=1, tree__depth=depth, tree__n_nodes=depth + 1),
        ]
        for depth in range(1, 8)
    ]
    return runs


def of_heads() -> list[list[str]]:
    """The heads that come with the project, trained for longer."""
    given = ["--preset=full", "--prompts_per_set=20"]
    given += settings(train__features="stored", train__rows=2)
    given += larger(10, 8, 60)  # EAGLE-3's tree for 8B, to compare tau
    return [[f"--variant={variant}", *given] for variant in ("eagle3", "eagle2")]


def of_batches() -> list[list[str]]:
    """The shipped EAGLE-3 head in batches of 1 to 16, in a tree that pays at batch 1."""
    given = [f"--head={SHIPPED}", "--prompts_per_set=16", "--max_new_tokens=64"]
    given += settings(tree__width=2, tree__depth=1, tree__n_nodes=3)
    return [[f"--batch={batch}", *given] for batch in (1, 2, 4, 8, 16)]


def handed_on() -> list[str]:
    """Returns the flags the user gave that every run needs.

    Raises:
      ValueError: one that a study decides itself.
    """
    module = FLAGS.flags_by_module_dict()
    own = {flag.name for flag in module.get(ablate.__name__, []) if flag.present}
    wrong = sorted(own - set(HANDED_ON))
    if wrong:
        raise ValueError(
            f"--{wrong[0]} is for experiments.ablate; a study decides it by itself. It "
            f"takes --{', --'.join(HANDED_ON)}"
        )
    given = []
    for name in HANDED_ON:
        if FLAGS[name].present:
            value = FLAGS[name].value
            values = value if isinstance(value, list) else [value]
            given += [f"--{name}={one}" for one in values]
    return given


def main() -> None:
    if FLAGS.study == "batches" and (FLAGS["batch"].present or not FLAGS.questions):
        raise ValueError(
            "this study takes batches of 1 to 16 from each set, so --batch is its own; it "
            "needs --questions=FOLDER of sets of 16 prompts or more"
        )
    runs = {
        "variants": lambda: of_variants(bool(FLAGS.fixed_data)),
        "sweeps": of_sweeps,
        "heads": of_heads,
        "batches": of_batches,
    }[FLAGS.study]()
    given = handed_on()
    for number, run in enumerate(runs, 1):
        command = ["python", "-m", "experiments.ablate", *run, *given]
        print(f"run {number} of {len(runs)}: {shlex.join(command)}", flush=True)
        if FLAGS.list:
            continue
        code = subprocess.run([sys.executable, *command[1:]]).returncode
        if code:
            raise ValueError(f"run {number} failed with exit code {code}; see above")


if __name__ == "__main__":
    common.run(main)

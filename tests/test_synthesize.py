"""The target writes conversations: refill, filters, prompts, resuming, bad input."""

import collections
import dataclasses

import drivers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from configs import tiny as tiny_config
from eagle_jax import data, decode, tree
from eagle_jax import text as text_lib
from eagle_jax.config import DecodeConfig, SamplingConfig
from experiments import writer
from experiments.common import Setup
from experiments.evaluator import Method
from experiments.writer import Job, Settings

T = tiny.with_eos(tiny.target_config(n_layers=2), 7, 50)
D = tiny.draft_config(T, "eagle3", vocab_size=50)
PLAIN = DecodeConfig(T)
DRAFTED = DecodeConfig(T, D, tree.chain(3))
NEW = 20
rng = np.random.default_rng(0)
JOBS = [
    Job(n, rng.integers(0, T.vocab_size, length).tolist(), 100 + n)
    for n, length in enumerate((1, 70, 3, 64, 65, 12, 5, 130, 2))
]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(writer, "STEPS", 6)


@pytest.fixture(scope="module")
def params():
    return tiny.params(5, T, D)


def alone(params, job: Job, cfg: DecodeConfig) -> list[int]:
    (tokens,) = decode.generate(params, [job.ids], cfg, NEW, seed=job.seed)
    return tokens


# Rows that are refilled.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cfg", [PLAIN, DRAFTED], ids=["plain", "drafted"])
def test_a_refilled_row_says_what_its_prompt_says_alone(params, cfg, temperature):
    cfg = dataclasses.replace(cfg, sampling=SamplingConfig(temperature))
    got = {
        job.number: tokens
        for job, tokens in writer.continue_all(Method(params, cfg), JOBS, 3, 256, NEW)
    }
    assert sorted(got) == [job.number for job in JOBS]
    lengths = set()
    for job in JOBS:
        assert got[job.number] == alone(params, job, cfg)
        lengths.add(len(got[job.number]))
    assert len(lengths) > 2 and NEW in lengths  # some ended, some were cut


def test_the_order_and_the_batch_do_not_matter(params):
    cfg = dataclasses.replace(PLAIN, sampling=SamplingConfig(1.0))
    one, other = (
        {j.number: t for j, t in writer.continue_all(Method(params, cfg), *given)}
        for given in ((JOBS, 3, 256, NEW), (JOBS[::-1], 3, 256, NEW))
    )
    assert one == other


def test_prompts_are_asked_for_only_when_a_row_is_free(params):
    taken = []

    def jobs():
        for job in JOBS:
            taken.append(job.number)
            yield job

    ended = writer.continue_all(Method(params, PLAIN), jobs(), 3, 256, NEW)
    next(ended)
    assert taken == [0, 1, 2]
    assert len(list(ended)) == len(JOBS) - 1


def test_many_draws_of_one_prompt_share_its_prefill(params, monkeypatch):
    calls = []
    real = writer.begin
    monkeypatch.setattr(writer, "begin", lambda *a: calls.append(a[1]) or real(*a))
    cfg = dataclasses.replace(PLAIN, sampling=SamplingConfig(1.0))
    jobs = [Job(n, JOBS[2].ids, n) for n in range(5)]
    got = {
        j.number: t
        for j, t in writer.continue_all(Method(params, cfg), jobs, 2, 256, NEW)
    }
    assert calls == [JOBS[2].ids]
    for job in jobs:
        assert got[job.number] == alone(params, job, cfg)
    assert len({tuple(t) for t in got.values()}) == 5


def test_logits_that_are_not_finite_end_the_run(params):
    broken = params | {
        "target": params["target"] | {"norm": jnp.full(T.d_model, jnp.nan)}
    }
    with pytest.raises(FloatingPointError, match="not finite; check the weights"):
        list(writer.continue_all(Method(broken, PLAIN), JOBS[:2], 3, 256, NEW))


def test_replacing_a_row_leaves_the_others_and_takes_all_of_the_new_one(params):
    old = decode.start(params, [[1, 2, 3], [4], [5, 6]], DRAFTED, 300)
    new = decode.start(params, [[9, 8, 7, 6]], DRAFTED, 10, seed=4)
    assert new.target_cache.n_slots < old.target_cache.n_slots
    before, part = jax.device_get((as_numbers(old), as_numbers(new)))
    after = jax.device_get(as_numbers(decode.jit_replace_row(old, new, 1)))
    flat = [jax.tree.leaves(x) for x in (before, part, after)]
    for was, put, now in zip(*flat, strict=True):
        axis = 1 if now.ndim == 2 and now.shape[0] == D.d_model else 0
        was, put, now = (np.moveaxis(x, axis, 0) for x in (was, put, now))
        np.testing.assert_array_equal(now[[0, 2]], was[[0, 2]])
        room = now[1][..., : put.shape[-1]] if now.ndim == 4 else now[1]
        np.testing.assert_array_equal(room, put[0])


def as_numbers(state: decode.DecodeState):
    return state._replace(keys=jax.random.key_data(state.keys).T.sum(0))


# Prompts that the target makes up.


@pytest.fixture(scope="module")
def babbler() -> Setup:
    """Says words of small letters whoever's turn it is; its next token depends on the
    last one only."""
    _, _, text = tiny_config.load("float32", ())
    t = tiny.with_eos(tiny.markov_target_config(258), 0)
    d = tiny.markov_draft_config(t)
    letters = [text_lib.encode(text, c)[0] for c in "abcdefghijklmnopqrstuvwxyz"]
    space = text_lib.encode(text, " ")[0]
    table = np.full((258, 258), -30.0)
    table[:, letters] = 0.0
    table[letters, space] = 1.5
    table[letters, 0] = 0.5
    made = tiny.markov_params(table, table, t, d)
    return Setup(tiny_config.get_config(), t, made["target"], text, "babbler")


def babble(setup: Setup, out, **changes) -> writer.Writer:
    settings = Settings(
        **{
            "answer_tokens": 600, "temperatures": (0.9, 1.0), "max_new_tokens": 60,
            "max_prompt_tokens": 120, "batch": 3, "min_tokens": 4,
        }
        | changes
    )  # fmt: skip
    files = writer.files_of(out)
    writer.check_meta(files, writer.meta_of(setup, settings, "target"))
    made = (
        ([{"role": "user", "content": prompt}], "target", reason)
        for prompt, reason in writer.write_prompts(setup, settings, files.prompts)
    )
    method = Method({"target": setup.target_params}, DecodeConfig(setup.target_cfg))
    prompts = writer.Prompts(setup, settings, made)
    return writer.Writer(setup, method, settings, prompts, files)


def test_a_target_talks_to_itself(babbler, tmp_path):
    task = babble(babbler, tmp_path)
    task.run()
    rows = drivers.read_lines(task.files.conversations)
    counts = collections.Counter()
    for row in rows:
        counts[row["temperature"]] += row["n_tokens"]
        assert row["temperature"] == (0.9, 1.0)[row["id"] % 2]
    # Both have their share, and stop soon after.
    assert all(300 <= n < 300 + 4 * 60 for n in counts.values()) and len(counts) == 2
    drawn = drivers.read_lines(task.files.prompts)
    assert [row["draw"] for row in drawn] == list(range(len(drawn)))
    good = [row["prompt"] for row in drawn if not row["reason"]]
    assert len(set(good)) == len(good) > 8
    assert {row["reason"] for row in drawn} == {
        "",
        "prompt too short",
        "empty prompt",
    } - ({"empty prompt"})
    for row in rows:
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
        assert row["messages"][0]["content"] == good[row["id"]]
        # The same prompt with the same seed, answered alone.
        ids = text_lib.encode(
            babbler.text,
            text_lib.render(babbler.text, row["messages"][:1], True),
        )
        cfg = DecodeConfig(
            babbler.target_cfg, sampling=SamplingConfig(row["temperature"])
        )
        seed = writer.seed_of(0, "answer", row["id"])
        params = {"target": babbler.target_params}
        (tokens,) = decode.generate(params, [ids], cfg, 60, seed=seed)
        assert len(tokens) == row["n_tokens"] and (tokens[-1] == 0) == row["finished"]
        answer = row["messages"][1]["content"]
        assert text_lib.decode(babbler.text, tokens) == answer
    samples, report = data.load_samples(
        babbler.text, [task.files.conversations], 256, "drop"
    )
    assert report.kept == len(rows) and not report.skipped
    assert sum(int(s.mask.sum()) for s in samples) == sum(counts.values())

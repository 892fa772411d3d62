"""`config`: faults are found when a config is built, and overrides know their types."""

import dataclasses

import pytest
import tiny

from eagle_jax import tree
from eagle_jax.config import (
    Config,
    DecodeConfig,
    DraftConfig,
    SamplingConfig,
    TrainConfig,
    TreeConfig,
    default_taps,
    fingerprint,
    override,
)


@pytest.mark.parametrize(
    ("n_layers", "taps"),
    [
        (1, (0,)),
        (2, (0, 1)),
        (3, (0, 1, 2)),
        (4, (0, 2, 3)),
        (6, (0, 3, 5)),
        (7, (2, 3, 4)),
        (8, (2, 4, 5)),
        (32, (2, 16, 29)),
    ],
)
def test_default_taps_are_distinct_layers(n_layers, taps):
    assert default_taps(n_layers) == taps
    assert tiny.target_config(n_layers=n_layers).taps == taps


@pytest.mark.parametrize("taps", [(0, 0), (2, 1), (0, 3), (-1, 0)])
def test_taps_outside_the_target_or_out_of_order_are_refused(taps):
    with pytest.raises(ValueError, match="taps must be distinct ascending"):
        tiny.target_config(taps=taps)


def test_heads_must_divide():
    with pytest.raises(ValueError, match="n_heads to be a multiple of n_kv_heads"):
        tiny.target_config(n_heads=4, n_kv_heads=3)
    with pytest.raises(ValueError, match="n_heads to be a multiple of n_kv_heads"):
        tiny.draft_config(tiny.target_config(), n_kv_heads=0)


def test_fc_norm_and_norm_before_fc_exclude_each_other():
    with pytest.raises(ValueError, match="exclude each other"):
        tiny.draft_config(tiny.target_config(), fc_norm=True, norm_before_fc=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_nodes": 0}, "n_nodes >= 1"),
        ({"depth": -1}, "depth >= 0"),
        ({"width": 0}, "width >= 1"),
        ({"n_nodes": 3, "depth": 0}, "set both or neither"),
        ({"n_nodes": 1, "depth": 2}, "set both or neither"),
        ({"n_nodes": 6, "depth": 8, "width": 2}, "depth < n_nodes"),
        ({"n_nodes": 8, "depth": 2, "width": 2}, "at most 7 nodes"),
        ({"n_nodes": 6, "depth": 1, "width": 4}, "at most 5 nodes"),
    ],
)
def test_trees_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        TreeConfig(**fields)


def test_candidates_are_counted_level_by_level():
    assert TreeConfig(width=10, depth=6, n_nodes=60).n_candidates == 510
    assert TreeConfig(width=10, depth=8, n_nodes=60).n_candidates == 710
    assert tree.chain(4).n_candidates == 4
    assert TreeConfig().n_candidates == 0


def test_a_chain_is_told_by_its_width_not_by_its_number_of_nodes():
    assert tree.chain(4).is_chain
    assert tree.static(((0,), (0, 0))).is_chain
    assert not TreeConfig().is_chain
    assert not TreeConfig(width=2, depth=2, n_nodes=3).is_chain
    assert not tree.static(((0,), (1,))).is_chain


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (((0,), (0, 0), (1, 0)), r"\(1, 0\) has no parent \(1,\)"),
        (((0,), (0,)), r"\(0,\) stands twice"),
        (((0,), (-1,)), r"\(-1,\) needs ranks >= 0"),
        (((0,), (2,)), r"\(2,\) skips rank 1"),
    ],
)
def test_malformed_static_trees_are_named(paths, message):
    with pytest.raises(ValueError, match=message):
        tree.static(paths)


def test_unsorted_static_paths_are_refused():
    with pytest.raises(ValueError, match=r"\(0,\) stands behind \(0, 0\)"):
        TreeConfig(kind="static", width=1, depth=2, n_nodes=3, paths=((0, 0), (0,)))


def test_static_sizes_must_agree_with_the_paths():
    with pytest.raises(ValueError, match="give depth=1, got depth=2"):
        TreeConfig(kind="static", width=1, depth=2, n_nodes=2, paths=((0,),))


def test_the_eagle1_tree_has_25_nodes_below_the_root():
    cfg = tree.static(tree.EAGLE1_PATHS)
    assert (cfg.n_nodes, cfg.depth, cfg.width) == (26, 5, 4)
    per_level = [sum(len(p) == d for p in cfg.paths) for d in range(1, 6)]
    assert per_level == [4, 8, 8, 3, 2]


@pytest.mark.parametrize(
    "fields",
    [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 1.5}, {"min_p": -0.1}],
)
def test_sampling_settings_out_of_range_are_refused(fields):
    with pytest.raises(ValueError, match="must"):
        SamplingConfig(**fields)


def test_a_tree_needs_a_draft():
    with pytest.raises(ValueError, match="needs a draft head"):
        DecodeConfig(tiny.target_config(), tree=tree.chain(2))


def test_drawn_drafts_need_a_static_tree():
    t = tiny.target_config()
    d = tiny.draft_config(t)
    drawn = SamplingConfig(temperature=1.0, rule="sampled")
    with pytest.raises(ValueError, match=r"use tree\.static"):
        DecodeConfig(t, d, tree.chain(2), drawn)
    fixed = tree.static(((0,), (1,), (0, 0)))
    assert DecodeConfig(t, d, fixed, drawn).draws_drafts
    assert not DecodeConfig(t, d, fixed, SamplingConfig(rule="sampled")).draws_drafts
    assert not DecodeConfig(t, d, fixed, SamplingConfig(temperature=1.0)).draws_drafts
    assert not DecodeConfig(t, d, TreeConfig(), drawn).draws_drafts  # plain decoding


@pytest.mark.parametrize("fields", [{"rows": 0}, {"ttt_steps": 0}, {"held_out": 0.0}])
def test_training_settings_out_of_range_are_refused(fields):
    with pytest.raises(ValueError, match=r"train\."):
        TrainConfig(**fields)


@pytest.mark.parametrize(
    ("assignment", "read"),
    [
        ("seed=7", lambda c: c.seed == 7),
        ("tree.depth=6", lambda c: c.tree.depth == 6),
        ("sampling.temperature=1", lambda c: c.sampling.temperature == 1.0),
        ("sampling.rule=sampled", lambda c: c.sampling.rule == "sampled"),
        ("train.head_from_target=False", lambda c: c.train.head_from_target is False),
        ("taps=[1, 2]", lambda c: c.taps == (1, 2)),
        ("name=a=b", lambda c: c.name == "a=b"),
    ],
)
def test_override_changes_one_field(assignment, read):
    cfg = Config("x", tree=TreeConfig(width=2, depth=2, n_nodes=7))
    new = override(cfg, assignment)
    assert read(new) and not read(cfg)
    assert hash(new) != hash(cfg)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("seed", "expected field=value"),
        ("tree.depht=6", "'depht' is not one of .*depth"),
        ("nothing=6", "is not one of"),
        ("seed.more=6", "'seed' has no fields"),
        ("tree=6", "group of settings; set one of .*tree.depth"),
        ("seed=many", "needs a value of type int"),
        ("seed=1.5", "needs a value of type int"),
        ("seed=true", "needs a value of type int"),
        ("sampling.rule=both", "must be one of point, sampled"),
        ("tree.depth=8", "depth < n_nodes"),
    ],
)
def test_override_explains_what_is_wrong(assignment, message):
    cfg = Config("x", tree=TreeConfig(width=2, depth=2, n_nodes=7))
    with pytest.raises(ValueError, match=message):
        override(cfg, assignment)


def test_fingerprints_follow_every_field():
    cfg = Config("x")
    assert fingerprint(cfg, 1) == fingerprint(dataclasses.replace(cfg), 1)
    names = {fingerprint(c) for c in (cfg, override(cfg, "sampling.top_k=1"))}
    assert len(names) == 2
    assert len(fingerprint(cfg)) == 12


def test_configs_hash_and_compare_by_value():
    assert TreeConfig() == TreeConfig() and hash(DraftConfig()) == hash(DraftConfig())


def test_overrides_take_effect_together():
    cfg = override(Config(name="x"), "tree.n_nodes=5", "tree.width=2", "tree.depth=2")
    assert cfg.tree == TreeConfig(width=2, depth=2, n_nodes=5)
    # Neither order would do one by one: a tree of one node is one of depth 0.
    assert override(cfg, "tree.depth=0", "tree.n_nodes=1", "seed=1", "seed=2") == (
        Config(name="x", seed=2, tree=TreeConfig(width=2))
    )

"""`bench`: every part is timed, and one run is set beside another."""

import drivers


def test_bench_times_every_part_and_compares_two_runs(tmp_path):
    given = [*drivers.target_flags(), "--rounds=1", "--slots=256", f"--out={tmp_path}"]
    given += ["--nodes=1", "--nodes=4"]
    drivers.run("bench", *given)
    said = drivers.run("bench", *given, f"--compare={tmp_path / 'bench.jsonl'}")
    assert "time / other" in said
    first, second = drivers.read_lines(tmp_path / "bench.jsonl")
    names = [part["part"] for part in first["parts"]]
    assert names == [part["part"] for part in second["parts"]]
    for start in (
        *("read: BLAS", "matrix product", "plain step", "target forward, 4 nodes"),
        *("prefill of", "draft extend", "propose, width 8", "verify walk", "commit"),
        *("whole step, 5 nodes", "synthesis step", "features of", "training step"),
    ):
        assert sum(name.startswith(start) for name in names) in (1, 2), start
    for part in first["parts"]:
        assert part["seconds"] > 0
        limited = part["bytes"] > 0 or part["flops"] > 0
        assert (part["limit_over_time"] > 0) == limited
    wrong = drivers.fail("bench", f"--compare={drivers.home() / 'train.jsonl'}")
    assert "holds no line of bench" in wrong

"""Finding runs."""

from __future__ import annotations

from pathlib import Path

from gristmill.watch import folders
from gristmill.watch.folders import find_runs


def run_at(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "run.toml").touch()
    return path


def test_runs_are_found_a_few_levels_deep_and_not_inside_runs(tmp_path: Path) -> None:
    for name in ("a", "team/b", "1/2/3/c", "1/2/3/4/5/deep", ".hidden/d", "a/inner"):
        run_at(tmp_path / name)
    run_at(tmp_path / "a" / "set-aside" / "old")
    found = find_runs([tmp_path])
    assert [run.name for run in found] == ["c", "a", "b"]
    assert [run.name for run in find_runs([tmp_path / "a"])] == ["a"]
    assert find_runs([tmp_path / "nowhere"]) == []


def test_a_run_that_is_reached_twice_is_one(tmp_path: Path) -> None:
    run = run_at(tmp_path / "runs" / "a")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    (tmp_path / "runs" / "round").symlink_to(tmp_path)
    (found,) = find_runs([tmp_path, tmp_path / "link", run])
    assert found.path == run.resolve()
    assert found.id == folders.run_id(run.resolve())


def test_names_are_as_long_as_needed(tmp_path: Path) -> None:
    for name in ("x/lr1/seed0", "x/lr1/seed1", "x/lr2/seed1", "y/lr2/seed1", "z"):
        run_at(tmp_path / name)
    names = [run.name for run in find_runs([tmp_path])]
    assert names == ["seed0", "lr1/seed1", "x/lr2/seed1", "y/lr2/seed1", "z"]


def test_a_search_ends_in_a_tree_without_end(tmp_path: Path, monkeypatch: object) -> None:
    for number in range(30):
        run_at(tmp_path / f"run{number:02d}")
    left = folders.MOST_FOLDERS
    try:
        folders.MOST_FOLDERS = 10  # type: ignore[misc]
        assert len(find_runs([tmp_path])) == 9
    finally:
        folders.MOST_FOLDERS = left  # type: ignore[misc]

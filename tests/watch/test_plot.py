"""Pictures of invented runs: what is drawn, from where, and the message for a wrong folder or name."""

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from shoal.cli.main import USAGE, main
from shoal.errors import UserError
from shoal.watch.plot import COLORS, LENGTHS, RunLog, draw_panel, names_of, plot, read_run

from .test_summary import has_color, png_size


def rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


BLUE, RED = rgb(COLORS[0]), rgb(COLORS[1])


def make_run(folder: Path, steps: int, *, accuracies: tuple[float, ...] = (), **also: float) -> Path:
    folder.mkdir(parents=True)
    lines = [json.dumps({"step": float(s), "time_s": 1.0, "reward/mean": s / 10} | also) + "\n" for s in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    if accuracies:
        found = [
            {"version": v, "greedy": greedy, "sampled": None, "n": 4, "final": False}
            for v, greedy in enumerate(accuracies)
        ]
        (folder / "evaluations.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    return folder


def test_two_runs_are_drawn_side_by_side_in_a_color_each(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", 20, accuracies=(0.1, 0.2)), make_run(tmp_path / "b $x_1", 12, **{"optim/lr": 1.0})]
    assert plot(runs, tmp_path / "plot.png") == ["reward/mean", "heldout/greedy"], "what is worth watching"
    plot(runs[1:], tmp_path / "one.png")
    assert has_color(tmp_path / "plot.png", BLUE) and has_color(tmp_path / "plot.png", RED)
    assert png_size(tmp_path / "plot.png")[0] > png_size(tmp_path / "one.png")[0], "a panel more"


def test_a_run_that_goes_on_is_drawn_with_one_step(tmp_path: Path) -> None:
    plot([make_run(tmp_path / "a", 1)], tmp_path / "plot.png")
    assert has_color(tmp_path / "plot.png", BLUE)


def test_a_step_is_drawn_at_how_many_were_trained_and_an_evaluation_at_its_version(tmp_path: Path) -> None:
    series = read_run(make_run(tmp_path / "a", 2, accuracies=(0.5, 0.6)), "a").series
    assert series["reward/mean"] == [(1, 0.0), (2, 0.1)]
    assert series["heldout/greedy"] == [(0, 0.5), (1, 0.6)]


def test_the_final_evaluation_stands_for_its_version(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", 2, accuracies=(0.5, 0.6))
    with (folder / "evaluations.jsonl").open("a") as file:
        file.write('{"version": 1, "greedy": 0.8, "sampled": null, "n": 16, "final": true}\n')
    assert read_run(folder, "a").series["heldout/greedy"] == [(0, 0.5), (1, 0.8)]


def test_runs_called_alike_are_told_apart_by_their_paths() -> None:
    assert names_of([Path("x/a"), Path("y/a"), Path("y/b")]) == ["x/a", "y/a", "b"]


def test_a_run_without_a_step_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no step was trained"):
        plot([make_run(tmp_path / "a", 0)], tmp_path / "plot.png")
    assert not (tmp_path / "plot.png").exists()


def test_a_damaged_line_is_named_and_one_that_is_being_written_waits(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", 1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')
    assert len(read_run(folder, "a").series["reward/mean"]) == 1
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl holds a line that is not JSON"):
        read_run(folder, "a")


def test_a_folder_that_is_no_run_is_one_line_at_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", str(tmp_path), "--out", str(tmp_path / "a.html")]) == USAGE
    assert "is not a run: it holds no metrics.jsonl" in capsys.readouterr().err


def test_every_measured_value_is_a_point(tmp_path: Path) -> None:
    run = RunLog("a", {"heldout/greedy": [(0, 0.1), (8, 0.4)], "reward/mean": [(n, n / 10) for n in range(1, 30)]})
    for metric, points in (("heldout/greedy", 2), ("reward/mean", 29)):
        panel = Figure().subplots()
        draw_panel(panel, [run], metric)
        marked = [line for line in panel.get_lines() if line.get_marker() == "o"]
        assert [len(line.get_xdata()) for line in marked] == [points]
        assert marked[0].get_linestyle() == "None"
        assert panel.get_xlabel() == "steps trained"


def test_target_lengths_share_a_panel_and_several_sources_have_one_each(tmp_path: Path) -> None:
    both = {"reward/a/mean": 0.5, "reward/b/mean": 0.5}
    lengths = {"length/100/mean": 90.0, "length/200/mean": 150.0, "length/100/penalty": 0.1, "length_penalty/mean": 0.1}
    run = make_run(tmp_path / "a", 3, **{"score/mean": 0.5}, **both, **lengths)
    expected = ["reward/mean", "reward/a/mean", "reward/b/mean", "score/mean", "length_penalty/mean", LENGTHS]
    assert plot([run], tmp_path / "plot.png") == expected
    plain = make_run(tmp_path / "b", 3, **{"score/mean": 0.5, "reward/a/mean": 0.5})
    assert plot([plain], tmp_path / "plot.png") == ["reward/mean"], "one source, no target"


def test_produced_lengths_are_drawn_with_a_line_at_their_target() -> None:
    panel = Figure().subplots()
    produced = {
        "length/100/mean": [(1, 90.0), (2, 95.0)],
        "length/200/mean": [(1, 150.0)],
        "length/100/score": [(1, 0.5)],
    }
    draw_panel(panel, [RunLog("a", produced)], LENGTHS)
    points = [list(line.get_ydata()) for line in panel.lines if line.get_marker() == "o"]
    dashed = sorted(line.get_ydata()[0] for line in panel.lines if line.get_linestyle() == "--")
    assert points == [[90.0, 95.0], [150.0]] and dashed == [100.0, 200.0]
    assert sorted(text.get_text() for text in panel.texts) == ["100", "200"]

"""Pictures hold the record's own figures: what is drawn is read back from the axes."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from attn_variants.bench import canvas, pictures
from attn_variants.bench.cli import main
from attn_variants.bench.records import Entry

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"command": "attn-bench throughput --context 512,8192", "commit": "0123456789abcdef", "cpu": "Some CPU"}


def row(variant: str = "gqa", context: int = 512, **fields: Any) -> dict[str, Any]:
    """A decode row whose step takes 20 ms."""
    return {
        "subject": "tiny",
        "variant": variant,
        "peer": "attn-variants",
        "setting": "eager",
        "store": "full",
        "codec": "plain",
        "dtype": "float32",
        "device": "cpu",
        "threads": 2,
        "batch": 2,
        "context": context,
        "phase": "decode",
        "ms_p50": 20.0,
        "cache_bytes": 3000,
        "cache_bytes_read": 2000,
        "weight_bytes": 8000,
        "read_bandwidth": 1e9,
        "unquiet": False,
    } | fields


def drawn(picture: str, *rows: dict[str, Any]) -> Figure:
    found = pictures.decode_rows([Entry(each, ENVIRONMENT) for each in rows])
    with canvas.styled():
        return pictures.PICTURES[picture](found, [ENVIRONMENT])


def lines(figure: Figure, panel: int = 0) -> list[tuple[list[float], list[float]]]:
    """The points of every line of a panel that has any."""
    found = [(list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for line in _lines(figure, panel)]
    return [line for line in found if line[0]]


def _lines(figure: Figure, panel: int) -> Any:
    return figure.axes[panel].get_lines()


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_speed_is_all_sequences_tokens_over_the_steps_time_in_the_order_of_contexts():
    figure = drawn("tokens-per-s", row(context=8192, ms_p50=40.0), row(), row("mla", ms_p50=10.0))
    assert lines(figure) == [([512, 8192], [100, 50]), ([512], [200])]
    assert legend(figure) == ["gqa", "mla"]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["512", "8k"]
    assert figure.get_suptitle() == "Decode speed, tiny, float32, batch 2, Some CPU, 2 threads"


def test_the_medians_interval_is_drawn_in_tokens_per_second():
    figure = drawn("tokens-per-s", row(ms_p50_interval=[16.0, 25.0]))
    (bars,) = figure.axes[0].collections
    ((low, high),) = [[float(point[1]) for point in segment] for segment in bars.get_segments()]
    assert (low, high) == (80, 125)


def test_a_peer_is_one_dashed_line_whatever_its_fastest_setting():
    theirs = {"peer": "transformers", "ms_p50": 50.0}
    figure = drawn("tokens-per-s", row(), row(**theirs, setting="a"), row(context=1024, **theirs, setting="b"))
    assert lines(figure) == [([512], [100]), ([512, 1024], [40, 40])]
    assert [line.get_linestyle() for line in _lines(figure, 0)] == ["-", "--"]
    assert legend(figure) == ["ours, eager", "transformers"]


def test_batches_dtypes_and_machines_have_panels_of_their_own():
    figure = drawn("tokens-per-s", row(), row(batch=8), row(batch=8, threads=1))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["batch 2, Some CPU, 2 threads", "batch 8, Some CPU, 2 threads", "batch 8, Some CPU, 1 threads"]
    assert [lines(figure, panel)[0][1] for panel in range(3)] == [[100], [400], [400]]


def test_speeds_far_apart_are_on_a_logarithmic_axis_and_others_begin_at_zero():
    assert drawn("tokens-per-s", row(), row("mla", ms_p50=401.0)).axes[0].get_yscale() == "log"
    near = drawn("tokens-per-s", row(), row("mla", ms_p50=400.0)).axes[0]
    assert (near.get_yscale(), near.get_ylim()[0]) == ("linear", 0)


def test_bytes_are_a_sequences_by_formula_and_as_reserved():
    compiled = row(setting="compiled")
    figure = drawn("cache-bytes", row(), compiled, row("mla", cache_bytes=900, cache_bytes_read=600))
    formula, reserved, smaller, smaller_reserved = lines(figure)
    assert formula == ([512, 512], [1000, 1000])
    assert reserved == ([512, 512], [1500, 1500])
    assert (smaller, smaller_reserved) == (([512], [300]), ([512], [450]))
    # How it is computed changes no byte.
    assert legend(figure) == ["gqa", "mla"]


def test_a_ragged_batch_has_a_panel_of_its_own_and_no_sequence_whose_bytes_are_drawn():
    ragged = row(batch=3, batch_spec="2x64+1x512")
    figure = drawn("tokens-per-s", row(batch_spec="2x512"), ragged)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["batch 2", "batch 2x64+1x512"]
    assert lines(drawn("cache-bytes", row(), ragged)) == lines(drawn("cache-bytes", row()))
    with pytest.raises(pictures.LackingError):
        drawn("cache-bytes", ragged)
    # Equally many sequences with as long a longest one are not the same measured again.
    found = pictures.decode_rows([Entry(each, ENVIRONMENT) for each in (ragged, row(batch=3, batch_spec="3x512"))])
    assert pictures.latest(found) == (found, 0)


def test_what_memory_did_not_hold_is_left_out(tmp_path):
    refused = row("mha", **dict.fromkeys(("ms_p50", "cache_bytes", "cache_bytes_read")), error="out of memory")
    said = list(pictures.draw_pictures([Entry(each, ENVIRONMENT) for each in (row(), refused)], tmp_path))
    assert said[0].startswith("left out 1 of 2 rows")
    # A record of nothing else has no pictures.
    said = list(pictures.draw_pictures([Entry(refused, ENVIRONMENT)], tmp_path / "none"))
    assert [line.split(":")[0] for line in said[1:]] == [f"{name} is not drawn" for name in pictures.PICTURES]


def test_a_roofline_has_the_runs_own_ceilings_and_each_step_below():
    figure = drawn("roofline", row(step_flops=40_000, matmul_rate=5e9), row("mla", step_flops=80_000, matmul_rate=5e9))
    roof, gqa, mla = lines(figure)
    # 10000 bytes are read: 4 and 8 FLOP per byte. Memory's line meets arithmetic's at 5.
    assert roof == ([2, 5, 16], [2, 5, 5])
    assert (gqa, mla) == (([4], [0.002]), ([8], [0.004]))


def test_equal_memory_is_a_bar_each_with_its_batch_on_it():
    rows = [row(budget=2**20, batch=3), row("mla", budget=2**20, batch=12, ms_p50=30.0)]
    figure = drawn("equal-memory", *rows, row(context=8192, budget=2**20, batch=1))
    assert [bar.get_width() for bar in figure.axes[0].patches] == [150, 400]
    assert [text.get_text() for text in figure.axes[0].texts] == ["batch 3", "batch 12"]
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["context 512", "context 8,192"]
    assert "1 MiB of cache" in figure.get_suptitle()


def test_a_footer_says_what_made_the_rows():
    (footer,) = drawn("tokens-per-s", row()).texts[1:]
    assert footer.get_text() == "attn-bench throughput --context 512,8192, Some CPU, commit 0123456789ab"


def test_panels_legend_and_footer_stand_one_above_the_other():
    rows = [row(f"variant-{number}", batch=batch) for number in range(9) for batch in (1, 2)]
    figure = drawn("tokens-per-s", *rows)
    figure.draw_without_rendering()
    footer, legend_box = figure.texts[1].get_window_extent(), figure.legends[0].get_window_extent()
    panels = [axes.get_tightbbox() for axes in figure.axes]
    assert 0 <= footer.y0 < footer.y1 <= legend_box.y0 < legend_box.y1 <= min(panel.y0 for panel in panels)
    assert max(panel.y1 for panel in panels) <= figure.texts[0].get_window_extent().y0
    assert 0 <= legend_box.x0 < legend_box.x1 <= figure.bbox.x1


def said(tmp_path: Path, *rows: dict[str, Any]) -> list[str]:
    return list(pictures.draw_pictures([Entry(each, ENVIRONMENT) for each in rows], tmp_path))


def test_pictures_without_their_fields_are_left_out_and_say_which(tmp_path):
    assert said(tmp_path, row()) == [
        f"wrote {tmp_path}/tokens-per-s.svg",
        f"wrote {tmp_path}/cache-bytes.svg",
        "roofline is not drawn: no row has step_flops and matmul_rate",
        "equal-memory is not drawn: no row has budget",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache-bytes.svg", "tokens-per-s.svg"]


def test_what_is_no_evidence_is_left_out_and_said(tmp_path):
    rows = [row(), row("mha", unquiet=True), row("mla", wrong="logits"), row("mqa", ms_p50=None)]
    first, *_ = said(tmp_path, *rows)
    assert first == "left out 3 of 4 rows: cores were shared (unquiet), or output wrong or missing"
    text = (tmp_path / "tokens-per-s.svg").read_text()
    assert not any(name in text for name in ("mha", "mla", "mqa"))
    again = said(tmp_path, row(unquiet=True))
    assert again[1:] == [f"{name} is not drawn: no row is left" for name in pictures.PICTURES]


def test_what_was_measured_again_is_drawn_once(tmp_path):
    first, *_ = said(tmp_path, row(), row(ms_p50=30.0), row(batch=8))
    assert first == "left out 1 rows that were measured again; the later ones are drawn"
    entries = [Entry(row(ms_p50=1.0), {}), Entry(row(ms_p50=2.0), {}), Entry(row(batch=8), {})]
    (kept, _), count = pictures.latest(pictures.decode_rows(entries))
    assert (kept["ms_p50"], count) == (2, 1)


def test_the_same_rows_make_the_same_file(tmp_path):
    rows = [row(budget=2**20, step_flops=40_000, matmul_rate=5e9), row("mla", ms_p50_interval=[19.0, 21.0])]
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        assert len(said(folder, *rows)) == 4
    for path in folders[0].iterdir():
        assert path.read_bytes() == (folders[1] / path.name).read_bytes()
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_rows_of_other_commands_are_no_pictures(tmp_path):
    with pytest.raises(ValueError, match="no row is a decode row"):
        said(tmp_path, {"variant": "gqa", "phase": "prefill", "ms_p50": 3.0}, {"tokens_per_s": 4.0})


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attn_variants.bench.pictures", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_several_records_on_disk_are_drawn_together(tmp_path):
    for name in ("gqa", "mla"):
        record = {"schema": 1, "environment": ENVIRONMENT, "rows": [row(name)]}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    folder = tmp_path / "new" / "folder"
    records = [str(tmp_path / "gqa.json"), str(tmp_path / "mla.json")]
    done = ran(*records, "--output", str(folder), "--format", "png")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == f"wrote {folder}/tokens-per-s.png"
    assert (folder / "tokens-per-s.png").read_bytes().startswith(b"\x89PNG\r\n")
    missing = ran(str(tmp_path / "none.json"), "--output", str(folder))
    assert (missing.returncode, missing.stderr) == (2, f"error: {tmp_path}/none.json: No such file or directory\n")


def test_a_measurement_is_drawn_at_once(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("attn_variants.bench.throughput.read_bandwidth", lambda device: 1e9)
    # Whether the cores were ours is not what this test is about.
    monkeypatch.setattr("attn_variants.bench.measure.QUIET_SHARE", 0.0)
    flags = ["--variant", "gqa,mqa", "--context", "4,8", "--repeats", "1", "--warmup", "1"]
    sizes = ["--layers", "2", "--hidden-size", "64", "--intermediate-size", "32", "--vocab-size", "50"]
    folder = tmp_path / "pictures"
    assert main(["throughput", *sizes, *flags, "--plot", str(folder)]) == 0
    told = capsys.readouterr().err
    assert f"wrote {folder}/tokens-per-s.svg" in told
    text = (folder / "tokens-per-s.svg").read_text()
    assert ">gqa<" in text
    assert "attn-bench throughput --layers 2" in text


def test_without_matplotlib_nothing_is_measured(capsys, tmp_path, monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(canvas, "find_spec", lambda name: None if name == "matplotlib" else there(name))
    assert main(["throughput", "--plot", str(tmp_path / "x")]) == 2
    needs = "error: --plot needs matplotlib: pip install 'attn-variants[plots]' brings it\n"
    assert capsys.readouterr() == ("", needs)


def test_a_folder_that_cannot_be_is_refused(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    for folder, reason in (("file", "it is a file"), ("file/x", "Not a directory")):
        assert main(["throughput", "--plot", str(tmp_path / folder)]) == 2
        assert f"--plot {tmp_path}/{folder} is no folder and cannot be made ({reason})" in capsys.readouterr().err

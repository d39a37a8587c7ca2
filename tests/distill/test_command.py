"""`specinfer distill` and `specinfer judge`, and their page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer

from specinfer.cli.app import app, main
from specinfer.runtime import native

DOCS = Path(__file__).parents[2] / "docs" / "drafts.md"


@pytest.fixture(autouse=True)
def quiet_install(monkeypatch):
    if native.extension() is None:
        monkeypatch.setenv(native.VARIABLE, "off")  # else every run warns of what an install without it lacks


@pytest.mark.parametrize("command", ["distill", "judge"])
def test_the_page_lists_the_options_and_their_defaults(command):
    table = DOCS.read_text().split(f"<!-- options of {command} -->")[1].split("<!-- end -->")[0]
    documented = dict(re.findall(r"^\| `(--[a-z-]+)` \| ([^|]*?) *\|", table, re.MULTILINE))
    parameters = typer.main.get_command(app).commands[command].params
    options = {p.opts[0]: p.default for p in parameters if p.param_type_name == "option" and p.name != "help"}
    assert set(documented) == set(options)
    for name, default in options.items():
        if isinstance(default, int | str) and not isinstance(default, bool):
            assert documented[name] == str(default)


def test_distill_then_judge(tiny_model, prompts, tmp_path, capsys):
    options = [
        *("--size", "0.2m", "--vocab", "280", "--epochs", "1", "--max-tokens", "6", "--max-num-seqs", "8"),
        *("--batch-tokens", "512", "--device", "cpu"),
    ]
    command = ["distill", str(tiny_model), "--out", str(tmp_path / "d"), "--prompts", str(prompts), *options]
    assert main([*command, "--json"]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert record["drafts"][0]["name"] == "member-1"
    for stage in ("writing 96/96", "scoring 96/96", "training member-1", "judging"):
        assert stage in captured.err
    assert main([*command, "--quiet"]) == 0
    captured = capsys.readouterr()
    assert "acceptance length" in captured.out
    assert captured.err == ""

    draft = str(tmp_path / "d")
    measure = ["judge", str(tiny_model), draft, draft, "--prompts", str(prompts), "--every", "9"]
    assert main([*measure, "--max-tokens", "8", "--timed", "0", "--quiet", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["num_prompts"] == 6
    assert record["coverage"][draft] == record["coverage"]["together"]
    assert record["paces"] == []
    assert main([*measure, "--max-tokens", "4", "--timed", "1", "--quiet"]) == 0
    assert "top 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["distill", "TARGET", "--out", "DIR", "--prompts", "none.jsonl"], ["none.jsonl", "No such file"]),
        (["distill", "TARGET", "--out", "DIR", "--size", "0.002m"], ["fits no head", "--vocab"]),
        (["distill", "TARGET", "--out", "DIR", "--size", "seven"], ["seven", "7m"]),
        (["distill", "TARGET", "--out", "DIR", "--init", "TARGET", "--members", "2"], ["--init"]),
        (["distill", "TARGET", "--out", "DIR", "--size", "7m", "--features"], ["--features"]),
        (["distill", "none/at/all", "--out", "DIR"], ["none/at/all"]),
        (["distill", "TARGET"], ["--out"]),
        (["judge", "TARGET", "TARGET", "--prompts", "PROMPTS", "--every", "0"], ["every"]),
        (["judge", "TARGET", "TARGET", "--prompts", "PROMPTS", "--timed", "-1"], ["timed"]),
        (["judge", "TARGET", "--prompts", "PROMPTS"], ["draft"]),
    ],
)
def test_what_is_wrong_is_one_line(tiny_model, prompts, tmp_path, capsys, arguments, words):
    names = {"TARGET": str(tiny_model), "DIR": str(tmp_path / "d"), "PROMPTS": str(prompts)}
    assert main([names.get(a, a) for a in arguments]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: ")), captured.err
    assert all(word in captured.err for word in words)
    assert not (tmp_path / "d").exists()

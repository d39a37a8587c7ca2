from __future__ import annotations

import json

import pytest

ROWS = (
    '{"id": "a", "prompt": "Hello"}',
    '{"id": 7, "messages": [{"role": "user", "content": "Hi"}]}',
    "",
    '{"prompt_token_ids": [5, 6, 7], "category": "none of our business"}',
    '{"prompt": "The sea \\u00fc"}',
    '{"prompt": "One more"}',
)
SETTINGS = ("--max-tokens", "6", "--seed", "1", "--temperature", "0.9", "--max-num-seqs", "2")
KEYS = ["index", "id", "text", "token_ids", "finish_reason", "stop_reason", "seed", "stats"]


@pytest.fixture
def files(tmp_path):
    """Input and output."""
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(ROWS) + "\n")
    return path, tmp_path / "out.jsonl"


@pytest.fixture
def batch(tiny, files):
    def run(*arguments):
        return tiny("generate", "--input", files[0], "--output", files[1], *SETTINGS, *arguments)

    return run


def read(path):
    """Results by index, without what is never the same twice."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record.pop("stats", None)
    assert len({r["index"] for r in records}) == len(records)
    return {r["index"]: r for r in records}


def test_every_row_has_a_result(tiny, batch, files):
    result = batch()
    assert (result.code, result.out) == (0, "")
    assert "5 rows done" in result.err
    records = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert all(list(r) == KEYS for r in records)
    assert {r["index"]: r["id"] for r in records} == {0: "a", 1: 7, 2: None, 3: None, 4: None}
    hello = tiny("generate", "Hello", *SETTINGS, "--json").json["outputs"][0]
    assert read(files[1])[0]["text"] == hello["text"]


def test_without_output_results_go_to_stdout(tiny, batch, files):
    batch()
    result = tiny("generate", "--input", files[0], *SETTINGS)
    assert result.code == 0
    assert {r["index"]: r["text"] for r in result.lines} == {i: r["text"] for i, r in read(files[1]).items()}


def test_json_is_a_summary(batch, files):
    record = batch("--json").json
    assert (record["num_rows"], record["num_skipped"], record["num_output_tokens"]) == (5, 0, 30)
    record = batch("--json").json
    assert (record["num_rows"], record["num_skipped"], record["num_output_tokens"]) == (5, 5, 0)


def test_several_samples_are_one_line(batch, files):
    assert batch("--n", "2").code == 0
    assert all(len(r["outputs"]) == 2 for r in read(files[1]).values())


def test_what_is_done_is_not_done_again(batch, files, monkeypatch):
    batch()
    before = files[1].read_bytes()
    monkeypatch.setattr("specinfer.llm.LLM.__init__", lambda *_, **__: pytest.fail("nothing to do"))
    result = batch()
    assert result.code == 0
    assert "5 rows done (5 of them before)" in result.err
    assert files[1].read_bytes() == before


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_torn_last_line_is_redone(batch, files, cut):
    batch()
    whole, content = read(files[1]), files[1].read_bytes()
    files[1].write_bytes(content[:-cut])
    result = batch()
    assert result.code == 0
    assert "(4 of them before)" in result.err
    assert read(files[1]) == whole
    kept = content[: content[:-1].rindex(b"\n") + 1]
    assert files[1].read_bytes().startswith(kept)


def test_ctrl_c_keeps_what_is_done_and_the_same_command_resumes(batch, files, press_ctrl_c, monkeypatch):
    batch()
    whole = read(files[1])
    files[1].unlink()
    with monkeypatch.context():
        engines = press_ctrl_c(7)
        result = batch()
    done = read(files[1])
    assert result.code == 130
    assert 0 < len(done) < 5
    assert result.err == f"interrupted: {len(done)} of 5 rows are in {files[1]}; the same command resumes\n"
    assert not engines[0].has_work
    engines[0].check_integrity()
    monkeypatch.undo()
    assert batch().code == 0
    assert read(files[1]) == whole


def test_a_failure_keeps_what_is_done(batch, files, monkeypatch):
    from specinfer.cli.results import ResultFile

    append = ResultFile.append

    def full(self, record):
        if len(self.done) == 2:
            raise OSError(28, "No space left on device", str(self.path))
        append(self, record)

    monkeypatch.setattr(ResultFile, "append", full)
    batch().assert_error(1, "out.jsonl", "No space left")
    assert len(read(files[1])) == 2


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", ["not JSON"]),
        ('{"prompt": "caf\\', ["not JSON"]),
        ("[1]", ["object"]),
        ("{}", ["none of them"]),
        ('{"prompt": "a", "messages": []}', ["prompt and messages"]),
        ('{"prompt": 5}', ["prompt", "5"]),
        ('{"prompt": ""}', ["empty"]),
        ('{"messages": []}', ["messages"]),
        ('{"messages": [{"role": "user"}]}', ["content"]),
        ('{"prompt_token_ids": [1, "2"]}', ["integers"]),
        ('{"prompt_token_ids": [1, 300]}', ["300"]),
        ('{"prompt": "a", "temperature": 1}', ["temperature", "--temperature"]),
        ('{"prompt": "a", "prompt_logprobs": 1}', ["prompt_logprobs", "Python interface"]),
        ('{"prompt": "a", "id": [1]}', ["id"]),
        (json.dumps({"prompt": "x" * 600}), ["600", "512"]),
    ],
)
def test_a_bad_row_is_named_before_any_work(batch, files, row, words):
    with files[0].open("a") as file:
        file.write(row + "\n")
    batch().assert_error(2, f"{files[0]}:7: ", *words)
    assert not files[1].exists()


def test_input_that_is_no_file_of_rows(batch, files, tmp_path):
    files[0].write_bytes(b'{"prompt": "\xff"}\n')
    batch().assert_error(2, f"{files[0]}:1", "JSON")
    files[0].write_text("\n\n")
    batch().assert_error(2, "no rows")
    files[0].unlink()
    batch().assert_error(2, "in.jsonl", "No such file")


@pytest.mark.parametrize(
    "content", ["something else", '{"index": 0}\n', '{"index": 0, "id": "b"}\n', '{"index": 9, "id": null}\n']
)
def test_a_file_that_is_not_ours_is_left_alone(batch, files, content):
    files[1].write_text(content)
    batch().assert_error(2, str(files[1]), "hint")
    assert files[1].read_text() == content


def test_output_that_cannot_be_written(tiny, files, tmp_path):
    def run(path):
        return tiny("generate", "--input", files[0], "--output", path)

    run(tmp_path).assert_error(2, "directory")
    run(tmp_path / "no" / "out.jsonl").assert_error(2, "no directory")
    run(files[0]).assert_error(2, "same file")

from __future__ import annotations

import pytest

STATS = {"num_steps", "num_output_tokens", "acceptance_length", "acceptance_per_depth", "ttft", "tpot"}


def test_text_to_stdout_statistics_to_stderr(tiny):
    result = tiny("generate", "Hello", "--max-tokens", "12")
    as_json = tiny("generate", "Hello", "--max-tokens", "12", "--json").json
    assert result.out == as_json["outputs"][0]["text"] + "\n"
    assert "12 tokens" in result.err and "acceptance length" in result.err and "seed" in result.err
    assert "\x1b" not in result.out + result.err


def test_json(tiny):
    record = tiny("generate", "Hi", "--max-tokens", "7", "--temperature", "1", "--seed", "5", "--json").json
    assert record["prompt"] == "Hi"
    assert len(record["prompt_token_ids"]) == 2
    [sample] = record["outputs"]
    assert sample["seed"] == 5
    assert sample["finish_reason"] == "length"
    assert len(sample["token_ids"]) == sample["stats"]["num_output_tokens"] == 7
    assert sample["stats"].keys() >= STATS


def test_prompt_from_stdin(tiny):
    arguments = ("--max-tokens", "5", "--quiet")
    expected = tiny("generate", "Hello", *arguments)
    for stdin in ("Hello", "Hello\n"):
        assert tiny("generate", *arguments, stdin=stdin) == expected
        assert tiny("generate", "-", *arguments, stdin=stdin) == expected
    assert expected.err == ""


def test_the_same_text_with_any_draft_and_none(specinfer, tiny, tiny_model):
    arguments = ("Hello", "--max-tokens", "20", "--temperature", "0.8", "--seed", "3", "-q")
    texts = {
        tiny("generate", *arguments).out,
        tiny("generate", *arguments, "-d", "ngram", "--tree", "1,1").out,
        specinfer("generate", "-m", tiny_model, *arguments).out,
        specinfer("generate", "-m", tiny_model, "-d", "none", *arguments).out,
    }
    assert len(texts) == 1


def test_several_samples(tiny):
    arguments = ("Hello", "--n", "3", "--max-tokens", "4", "--temperature", "1", "--seed", "1")
    record = tiny("generate", *arguments, "--json").json
    assert [s["index"] for s in record["outputs"]] == [0, 1, 2]
    shown = tiny("generate", *arguments)
    for sample in record["outputs"]:
        assert f"--- sample {sample['index']} ---\n{sample['text']}\n" in shown.out
    assert shown.err.count("seed") == 3


def test_structured_outputs(tiny, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"enum": ["a", 12]}, "minItems": 2, "maxItems": 2}')
    assert tiny("generate", "Hi", "--json-schema", schema, "-q").out in (
        f"[{a}, {b}]\n" for a in ('"a"', 12) for b in ('"a"', 12)
    )
    assert tiny("generate", "Hi", "--regex", "(ab){3}", "-q").out == "ababab\n"
    for arguments, words in (
        (("--regex", "("), "structured_outputs.regex cannot be compiled"),
        (("--json-schema", tmp_path / "none"), "cannot read"),
        (("--json-schema", schema, "--regex", "a"), "structured_outputs has json and regex"),
    ):
        result = tiny("generate", "Hi", *arguments)
        assert result.code != 0 and words in result.err and "Traceback" not in result.err


def test_stop_string(tiny):
    text = tiny("generate", "Hello", "--max-tokens", "30", "--json").json["outputs"][0]["text"]
    stop = text[10:13]
    [sample] = tiny("generate", "Hello", "--max-tokens", "30", "--stop", stop, "--json").json["outputs"]
    assert sample["text"] == text[: text.find(stop)]
    assert (sample["finish_reason"], sample["stop_reason"]) == ("stop", stop)


def test_every_sampling_option_reaches_the_request(tiny):
    """All letters a to d: token ids 64 to 67."""
    letters = [x for token in range(64, 68) for x in ("--allowed-token-ids", str(token))]
    given = ("generate", "ab", "--max-tokens", "12", "--temperature", "1", "--seed", "2", *letters, "--json")

    def sample(*options):
        return tiny(*given, *options).json["outputs"][0]

    plain = sample()
    assert set(plain["text"]) <= set("abcd") and len(plain["text"]) == 12 and "logprobs" not in plain
    assert set(sample("--logit-bias", "64=-inf", "--logit-bias", "66=-100")["text"]) <= set("bd")
    assert "b" not in sample("--bad-words", "b")["text"]
    assert set(sample("--frequency-penalty", "2")["text"][:6]) == set("abcd")
    assert len(set(sample("--presence-penalty", "-2", "--repetition-penalty", "0.1")["text"])) < 4
    assert sample("--typical-p", "0.01")["text"] != plain["text"]
    stop = ("--stop-token-ids", "67", "--min-tokens", "3")
    assert not sample(*stop)["text"].endswith("d")
    ended = sample(*stop, "--include-stop-str-in-output")
    assert ended["text"].endswith("d") and ended["stop_reason"] == 67 and len(ended["text"]) > 3
    assert sample("--ignore-eos", "--show-special-tokens")["text"] == plain["text"]
    for token, scores in zip(plain["token_ids"], sample("--logprobs", "1")["logprobs"], strict=True):
        assert scores[0]["token_id"] == token and scores[0]["logprob"] < 0
        assert scores[-1]["rank"] == 1


def test_a_bias_that_is_none(tiny):
    result = tiny("generate", "ab", "--logit-bias", "64")
    assert result.code != 0 and "'64' is not ID=BIAS" in result.err


def test_verbose_prints_the_memory_table(tiny):
    result = tiny("generate", "Hello", "--max-tokens", "2", "-v", "-q")
    assert "info: memory:" in result.err and "K/V MiB" in result.err


def test_accepted_tokens_are_coloured_on_a_terminal_only(sure, monkeypatch):
    arguments = ("generate", "Hello", "--max-tokens", "6", "-q")
    plain = sure(*arguments).out
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setenv("TERM", "xterm")
    coloured = sure(*arguments).out
    assert "\x1b[32m" in coloured
    assert "\x1b" not in plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in sure(*arguments).out


def test_ctrl_c(tiny, press_ctrl_c):
    engines = press_ctrl_c(4)
    result = tiny("generate", "Hello", "--max-tokens", "100")
    assert result.code == 130
    assert result.err == "interrupted\n"
    assert len(engines) == 4
    assert result.out
    assert_idle(engines[0])


def test_ctrl_c_while_loading(specinfer, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("specinfer.llm.LLM.__init__", interrupted)
    result = specinfer("generate", "hi")
    assert (result.code, result.out, result.err) == (130, "", "interrupted\n")


def assert_idle(engine) -> None:
    assert not engine.has_work
    engine.check_integrity()


@pytest.mark.parametrize("text", ["a\x1b[31mb", "a\x07b", "a\x9bb"])
def test_no_control_characters_on_a_terminal(text):
    from specinfer.cli.console import printable

    assert printable(text) in ("ab", "a[31mb")
    assert printable("ä\n\tß") == "ä\n\tß"

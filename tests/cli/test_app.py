from __future__ import annotations

import io
import subprocess
import sys

import pytest

from specinfer.cli.options import EngineOptions
from specinfer.models.catalog import BUILT_IN, draft_path

COMMANDS = ("demo", "generate", "chat", "tree")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_lists_the_commands(specinfer, arguments):
    result = specinfer(*arguments)
    assert result.code == 0
    assert all(command in result.out for command in COMMANDS)
    assert result.err == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_shows_the_shared_options(specinfer, command):
    result = specinfer(command, "--help")
    assert result.code == 0
    options = (
        "--model --draft --tree --verifier --temperature --top-k --top-p --min-p --seed --stop --json --quiet"
    )
    assert all(option in result.out for option in options.split())
    assert "\x1b" not in result.out


def test_version(specinfer):
    result = specinfer("--version")
    assert (result.code, result.out.split()[0]) == (0, "specinfer")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("genrate",), ["genrate", "specinfer --help"]),
        (("generate", "--no-such"), ["--no-such", "specinfer generate --help"]),
        (("generate", "hi", "--max-tokens", "many"), ["--max-tokens", "integer"]),
        (("generate", "hi", "--dtype", "int3"), ["int3", "bfloat16"]),
        (("generate", "hi", "there"), ["there"]),
        (("tree", "hi", "--steps", "0"), ["--steps"]),
        (("generate", "hi", "--temperature", "-1"), ["temperature", "[0, 100]", "-1"]),
        (("generate", "hi", "--temperature", "nan"), ["temperature"]),
        (("generate", "hi", "--top-p", "0"), ["top_p"]),
        (("generate", "hi", "--min-p", "2"), ["min_p"]),
        (("generate", "hi", "--top-k", "-2"), ["top_k"]),
        (("generate", "hi", "--seed", "-1"), ["seed"]),
        (("generate", "hi", "--max-tokens", "0"), ["max_tokens"]),
        (("generate", "hi", "--stop", ""), ["stop"]),
        (("generate", "hi", "--n", "0"), ["n must be"]),
        (("generate", "hi", "--max-num-seqs", "0"), ["--max-num-seqs"]),
        (("generate", "hi", "--max-model-len", "0"), ["max_model_len"]),
        (("generate", "hi", "--tree", "0"), ["[0]", "3,2,1,1"]),
        (("generate", "hi", "--tree", "10,10,10,10"), ["11111", "1024"]),
        (("generate", "hi", "--tree", "wide"), ["'wide'"]),
        (("generate", "hi", "--draft", "none", "--draft", "ngram"), ["none"]),
        (("generate", "hi", "--output", "x.jsonl"), ["--output", "--input"]),
        (("generate", "hi", "--input", "x.jsonl"), ["--input"]),
        (("generate", ""), ["empty"]),
        (("generate", "caf\udce9"), ["UTF-8"]),
        (("generate",), ["empty"]),
        (("chat", "--temperature", "-1"), ["temperature"]),
        (("demo", "--tree", "1,0"), ["widths"]),
    ],
)
def test_what_is_wrong_without_a_model(specinfer, monkeypatch, arguments, words):
    monkeypatch.setattr("specinfer.llm.LLM.__init__", lambda *_, **__: pytest.fail("a model was loaded"))
    specinfer(*arguments).assert_error(2, *words)


def test_no_prompt_at_a_terminal(specinfer, at_terminal):
    specinfer("generate", stdin=at_terminal("")).assert_error(2, "no prompt", "hint")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_stdin_that_is_not_utf8(tiny, command):
    stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8")
    tiny(command, stdin=stdin).assert_error(2, "not UTF-8", "iconv")


def test_ctrl_c_during_the_imports():
    code = """
import sys
from specinfer.__main__ import main
class CtrlC:
    def find_spec(self, name, *others):
        if name == "numpy":
            raise KeyboardInterrupt
sys.meta_path.insert(0, CtrlC())
sys.exit(main())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (130, b"", b"interrupted\n")


def test_importing_the_command_line_is_light_and_python_m_runs_it():
    heavy = "[m for m in ('torch', 'transformers') if m in sys.modules]"
    code = f"import sys, specinfer.cli.app; heavy = {heavy}; sys.exit(f'{{heavy}} imported' if heavy else 0)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    shown = subprocess.run([sys.executable, "-m", "specinfer", "--version"], capture_output=True, timeout=60)
    assert shown.stdout.startswith(b"specinfer ")


def test_a_closed_pipe_is_no_failure_to_talk_about():
    command = subprocess.Popen(
        [sys.executable, "-m", "specinfer", "generate", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    command.stdout.close()
    assert command.stderr.read() == b""
    command.stderr.close()
    command.wait(60)


class TestModels:
    """Models that cannot be used. The weights are looked at, so these run on tiny files."""

    @pytest.mark.parametrize("option", ["-m", "-d"])
    def test_missing_is_found_before_anything_is_loaded(self, specinfer, tmp_path, monkeypatch, option):
        monkeypatch.setitem(sys.modules, "specinfer.llm", None)
        specinfer("generate", "hi", option, tmp_path / "no.gguf").assert_error(1, "no.gguf")

    def test_not_gguf(self, specinfer, tmp_path):
        path = tmp_path / "x.gguf"
        path.write_bytes(b"not a model")
        specinfer("generate", "hi", "-m", path).assert_error(1, "x.gguf")

    def test_empty_directory(self, specinfer, tmp_path):
        specinfer("generate", "hi", "-m", tmp_path).assert_error(1, str(tmp_path))

    def test_unsupported_architecture(self, specinfer, tmp_path, write_model):
        path = write_model(tmp_path / "m", model_type="mamba", architectures=["MambaForCausalLM"])
        specinfer("generate", "hi", "-m", path).assert_error(1, "mamba")

    def test_truncated_safetensors(self, specinfer, tmp_path, write_model):
        path = write_model(tmp_path / "m")
        weights = path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        specinfer("generate", "hi", "-m", path).assert_error(1, "model.safetensors")

    def test_draft_of_another_vocabulary(self, specinfer, tmp_path, tiny_model, write_model):
        path = write_model(tmp_path / "d", vocab_size=280, tokenizer=False)
        specinfer("generate", "hi", "-m", tiny_model, "-d", path).assert_error(2, "280", "300")

    def test_drafts_that_ship_are_known(self):
        for model, entry in BUILT_IN.items():
            for draft in entry.drafts:
                EngineOptions(model=model, draft=[draft]).check()
                assert draft_path(model, draft).exists()

    def test_no_default_draft(self, specinfer, tiny_model):
        specinfer("generate", "hi", "-m", tiny_model, "-d", "default").assert_error(2, "no draft")

    def test_unknown_verifier(self, tiny):
        tiny("generate", "hi", "--verifier", "guess").assert_error(2, "guess", "coupled")

    def test_too_long_a_context(self, tiny):
        tiny("generate", "hi", "--max-model-len", "513").assert_error(2, "513", "512")

    def test_prompt_longer_than_the_context(self, tiny):
        tiny("generate", "x" * 600).assert_error(2, "600", "512", "hint: shorten the prompt\n")

    def test_a_demo_needs_a_draft(self, specinfer, tiny_model):
        specinfer("demo", "-m", tiny_model, "-d", "none").assert_error(2, "without a draft", "none")

    def test_any_model_has_ngrams(self):
        assert EngineOptions(model="a/b").drafts() == ("ngram",)
        assert EngineOptions().drafts() == ("default", "ngram")
        assert EngineOptions(draft=["none"]).drafts() == ()

    def test_chat_needs_a_template(self, specinfer, tmp_path, write_model):
        path = write_model(tmp_path / "m")
        (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        specinfer("chat", "-m", path, stdin="hi\n").assert_error(2, "chat template")

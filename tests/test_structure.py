"""The shape of the house: imports only go down, files stay small, the public names are these."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import specinfer

PACKAGE = Path(specinfer.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 400
LEVELS = {
    "config": 0, "sampling_params": 0, "structured_outputs": 0, "outputs": 0, "errors": 0, "metrics": 0,
    "interrupt": 0, "service": 0, "extension": 0,
    "tree": 1, "sampling": 1,
    "attention": 2, "cache": 2, "verify": 2,
    "models": 3,
    "runtime": 4,
    "draft": 5,
    "engine": 6,
    "llm": 7, "cli": 7, "server": 7, "distill": 7, "__main__": 7, "__init__": 8,
}  # fmt: skip
MAY_IMPORT_ITS_LEVEL = {
    "cli": {"distill", "llm", "server"},
    "distill": {"llm"},
    "__main__": {"cli"},
    "config": {"errors"},
    "sampling_params": {"errors", "structured_outputs"},
    "structured_outputs": {"errors"},
    "service": {"errors"},
    "metrics": {"outputs", "service"},
}


def room(path: Path) -> str:
    """The part of the package that a file belongs to."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_rooms(path: Path) -> Iterator[str]:
    """Rooms that a file imports anywhere, lazily or for types alone included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
            if node.module == "specinfer":
                names = [f"specinfer.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "specinfer":
                yield parts[1] if len(parts) > 1 and parts[1] in LEVELS else "__init__"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_go_down(path: Path) -> None:
    own = room(path)
    for other in set(imported_rooms(path)) - {own}:
        if other in MAY_IMPORT_ITS_LEVEL.get(own, set()):
            continue
        assert LEVELS[other] < LEVELS[own], f"{own} imports {other}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_are_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_a_mask_never_enters_a_model_file() -> None:
    for path in (PACKAGE / "models").glob("*.py"):
        assert not {"tree", "cache", "engine"} & set(imported_rooms(path)), path


def test_the_server_reaches_the_engine_by_its_async_front_alone() -> None:
    for path in (PACKAGE / "server").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specinfer.engine"):
                assert node.module == "specinfer.engine.async_engine", path


def test_public_names() -> None:
    expected = {
        "LLM", "Chain", "CompletionOutput", "ConfigError", "DownloadError", "EngineConfig", "Expansion",
        "GenerationStats", "ModelError", "RequestError", "RequestOutput", "SamplingParams", "SpecinferError",
        "StreamChunk", "StructuredOutputsParams", "TokenTree", "merge",
    }  # fmt: skip
    assert set(specinfer.__all__) == expected
    assert all(getattr(specinfer, name).__doc__ for name in expected)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_import_quietly(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    relative = path.relative_to(PACKAGE.parent).with_suffix("")
    importlib.import_module(".".join(relative.parts).removesuffix(".__init__"))
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_the_step_fits_on_a_screen() -> None:
    assert len((PACKAGE / "engine" / "step.py").read_text().splitlines()) <= 120

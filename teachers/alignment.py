"""Two tokenizers over one text, met at the only place that both describe exactly: its bytes.

Nothing here decodes single ids. A piece of a byte-level vocabulary stands for bytes by a fixed table, one of a
sentencepiece vocabulary is text or a byte token, and any other is text: so a character that is split over tokens is
its bytes, not a replacement mark.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

Pieces = Sequence[bytes | None]  # one entry per token; None: a token that stands for no text
Group = tuple[list[int], list[int]]  # numbers of the student's and the teacher's tokens that cover the same bytes
MARK = b"\xff"  # in place of a special token that both have: no text has this byte
GUARDS = ("\n", "|", "0", "a", "é")
UNREADABLE = {"WordPiece", "CTC", "BPEDecoder"}  # these decoders put in or take out spaces


@dataclass(frozen=True)
class Alignment:
    """One response under both tokenizers.

    Attributes:
        teacher_ids: what the teacher reads in place of the response.
        student, teacher: pieces of the two; None for a token of the student that the teacher is not told of.
        groups: smallest runs of tokens that cover the same bytes, in order; no token is in two.
        cut: the student's tokens at the end whose bytes are no whole text.
    """

    teacher_ids: list[int]
    student: list[bytes | None]
    teacher: list[bytes | None]
    groups: list[Group]
    cut: int


def byte_groups(student: Pieces, teacher: Pieces) -> list[Group]:
    """Smallest groups of tokens that end at the same byte, as far as both have the same bytes.

    A token without bytes (a start token of one side) belongs to no group. What follows the first byte in which the two
    differ, or the last at which both end together, is in none either.
    """
    mine, theirs = ([(number, len(p)) for number, p in enumerate(side) if p is not None] for side in (student, teacher))
    contents = [b"".join(piece for piece in side if piece is not None) for side in (student, teacher)]
    shared = next((n for n, (a, b) in enumerate(zip(*contents, strict=False)) if a != b), min(map(len, contents)))
    groups: list[Group] = []
    waiting: Group = ([], [])
    ends = [0, 0]
    places = [0, 0]
    while True:
        side = 0 if ends[0] <= ends[1] else 1
        tokens = (mine, theirs)[side]
        if places[side] == len(tokens):
            return groups
        number, length = tokens[places[side]]
        waiting[side].append(number)
        ends[side] += length
        places[side] += 1
        if max(ends) > shared:
            return groups
        if ends[0] == ends[1] and all(waiting):
            groups.append(waiting)
            waiting = ([], [])


class Vocabulary:
    """A tokenizer as bytes: what each id stands for, and how a text is written in ids.

    Args:
        tokenizer: a fast tokenizer of the byte-level, sentencepiece or whole-piece kind.
        key: names its owner in messages.

    Raises:
        ValueError: another kind of tokenizer, whose pieces are not parts of the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, key: str) -> None:
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ValueError(
                f"{key}: {type(tokenizer).__name__} is not a fast tokenizer, so the bytes of its tokens are not known; "
                "give a model folder with a tokenizer.json"
            )
        settings = tokenizer.backend_tokenizer.to_str()
        self.core = Tokenizer.from_str(settings)  # a copy: its settings below are not the caller's
        self.core.encode_special_tokens = True  # text that looks like a special token is text
        self.core.no_padding()
        self.core.no_truncation()
        self.tokenizer = tokenizer
        self.pieces = _pieces(tokenizer, json.loads(settings), key)
        self._prefixed = (self._piece_of_first("a") or b"").startswith(b" ")

    def piece(self, index: int) -> bytes | None:
        """What an id stands for; None for a special token, and for one beyond the tokenizer's (of a padded head)."""
        return self.pieces[index] if index < len(self.pieces) else None

    @cached_property
    def by_bytes(self) -> Mapping[bytes, int]:
        """Bytes -> the id that stands for them; where several do, the one that the tokenizer itself uses."""
        found: dict[bytes, int] = {}
        twice: set[bytes] = set()
        for index, piece in enumerate(self.pieces):
            if piece:
                twice |= {piece} & found.keys()
                found.setdefault(piece, index)
        texts = {piece: text for piece in twice if (text := _text(piece)) is not None}
        for piece, ids in zip(texts, self.encode_all(list(texts.values())), strict=True):
            if len(ids) == 1 and self.pieces[ids[0]] == piece:
                found[piece] = ids[0]
        return found

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest piece."""
        return max(map(len, self.by_bytes), default=0)

    def encode(self, text: str) -> list[int]:
        """Ids of a text that goes on from other text: without special tokens, and without a space put in front."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The same of many texts."""
        plain = [encoding.ids for encoding in self.core.encode_batch(list(texts), add_special_tokens=False)]
        if not self._prefixed:
            return plain
        left = dict(enumerate(texts))
        for guard in GUARDS:
            encodings = self.core.encode_batch([guard + text for text in left.values()], add_special_tokens=False)
            for number, encoding in zip(list(left), encodings, strict=True):
                start = self._after(encoding.ids, guard)
                if start is not None:
                    plain[number] = encoding.ids[start:]
                    del left[number]
        return plain

    def _after(self, ids: Sequence[int], guard: str) -> int | None:
        """The number of tokens that spell the guard, with or without a space before it; None where none end there."""
        spelled = b""
        for number, index in enumerate(ids):
            if spelled.removeprefix(b" ") == guard.encode():
                return number
            spelled += self.pieces[index] or b""
        return len(ids) if spelled.removeprefix(b" ") == guard.encode() else None

    def first_of(self, contents: Sequence[bytes]) -> list[int | None]:
        """The id with which this tokenizer starts to write each of the contents; None where it has none.

        Bytes that are no text alone start with the longest piece that they begin with.
        """
        texts = [_text(content) for content in contents]
        encoded = iter(self.encode_all([text for text in texts if text]))
        found: list[int | None] = []
        for content, text in zip(contents, texts, strict=True):
            ids = next(encoded) if text else []
            piece = self.pieces[ids[0]] if ids else None
            found.append(ids[0] if piece and content.startswith(piece) else self._longest_prefix(content))
        return found

    def _longest_prefix(self, content: bytes) -> int | None:
        lengths = range(min(len(content), self.longest), 0, -1)
        return next((self.by_bytes[content[:n]] for n in lengths if content[:n] in self.by_bytes), None)

    def _piece_of_first(self, text: str) -> bytes | None:
        ids = self.core.encode(text, add_special_tokens=False).ids
        return self.pieces[ids[0]] if ids else None


def align(ids: Sequence[int], student: Vocabulary, teacher: Vocabulary, specials: Mapping[int, int]) -> Alignment:
    """A response of the student as the teacher reads it. `specials`: ids of special tokens, the student's -> its own.

    The teacher reads up to the first special token without a counterpart, the first bytes that are no text, or the
    first byte that it writes otherwise (a normalizer, a character that it does not know).
    """
    mine: list[bytes | None] = [None] * len(ids)
    theirs: list[bytes | None] = []
    written: list[int] = []
    cut = 0
    for start, end in _runs(ids, student):
        if student.piece(ids[start]) is None:
            if ids[start] not in specials:
                break
            mine[start] = MARK
            written.append(specials[ids[start]])
            theirs.append(MARK)
            continue
        pieces = [student.piece(index) or b"" for index in ids[start:end]]
        content = b"".join(pieces)
        text = _beginning(content)
        mine[start:end] = pieces
        new = teacher.encode(text)
        written += new
        theirs += [teacher.pieces[index] or MARK for index in new]
        if len(text.encode()) < len(content):
            cut = _ending_after(pieces, len(text.encode()))
            break
        if b"".join(teacher.pieces[index] or MARK for index in new) != content:
            break
    groups = byte_groups(mine, theirs)
    return Alignment(written, mine, theirs, groups, cut)


def _runs(ids: Sequence[int], vocabulary: Vocabulary) -> Iterator[tuple[int, int]]:
    """Start and end of every stretch of text and of every special token."""
    start = 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or vocabulary.piece(ids[place]) is None or vocabulary.piece(ids[start]) is None:
            yield start, place
            start = place


def _ending_after(pieces: Sequence[bytes], byte: int) -> int:
    """How many of the pieces end after so many bytes."""
    ends = 0
    count = 0
    for piece in pieces:
        ends += len(piece)
        count += ends > byte
    return count


def _text(content: bytes) -> str | None:
    """The text that the bytes are; None where they are none."""
    text = _beginning(content)
    return text if len(text.encode()) == len(content) else None


def _beginning(content: bytes) -> str:
    """The longest text that the bytes begin with."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        return content[: error.start].decode()


def _pieces(tokenizer: PreTrainedTokenizerFast, settings: Mapping[str, Any], key: str) -> list[bytes | None]:
    """What every id stands for."""
    parts = [settings[name] for name in ("pre_tokenizer", "decoder", "normalizer")]
    kinds = {kind for part in parts for kind in _kinds(part)}
    if settings["model"]["type"] == "WordPiece" or kinds & UNREADABLE:
        raise ValueError(
            f"{key}: its tokenizer ({settings['model']['type']}) does not keep the spaces between words, so its tokens "
            "cannot be laid over another's; use a teacher of the same tokenizer, or one with a byte-level or "
            "sentencepiece vocabulary"
        )
    byte_tokens = bool(settings["model"].get("byte_fallback")) or "ByteFallback" in kinds
    spaced = byte_tokens or "Metaspace" in kinds
    read = _byte_level if "ByteLevel" in kinds else _sentencepiece if spaced else str.encode
    vocabulary = tokenizer.get_vocab()
    pieces: list[bytes | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for piece, index in vocabulary.items():
        pieces[index] = read(piece)
    for index, added in tokenizer.added_tokens_decoder.items():
        text = added.content
        pieces[index] = None if added.special else _sentencepiece(text) if read is _sentencepiece else text.encode()
    for index in tokenizer.all_special_ids:
        pieces[index] = None
    return pieces


def _kinds(node: Any) -> Iterator[str]:
    """The types of all parts of a pre-tokenizer, decoder or normalizer."""
    if isinstance(node, Mapping):
        if "type" in node:
            yield str(node["type"])
        for inner in node.values():
            yield from _kinds(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from _kinds(inner)


def _sentencepiece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


def _byte_level(piece: str) -> bytes:
    """A character of a byte-level vocabulary is a byte; one that is none (of an added token) is itself."""
    return b"".join(bytes([BYTES[c]]) if c in BYTES else c.encode() for c in piece)


def _byte_table() -> dict[str, int]:
    """GPT-2's table: printable bytes of Latin-1 stand for themselves, the others for characters from 256 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + number): byte for number, byte in enumerate(hidden)}


BYTES = _byte_table()

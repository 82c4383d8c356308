"""Two tokenizers over one text: groups of equal bytes, whatever the tokens are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from opd.teachers.alignment import Alignment, Vocabulary, align, byte_groups
from tests.tiny import tokenizer as characters
from tests.tokenizers_of_bytes import SAMPLE, byte_fallback, byte_level

CASE_10 = "a😀é 数"
BYTES = Vocabulary(byte_level(vocab_size=258), "bytes")
WORDS = Vocabulary(byte_level([CASE_10] * 9, vocab_size=290, start="<start>", end="<stop>"), "words")
KINDS = {
    "bytes": BYTES,
    "small": Vocabulary(byte_level(vocab_size=300), "small"),
    "large": Vocabulary(byte_level(SAMPLE * 3, vocab_size=600), "large"),
    "fallback": Vocabulary(byte_fallback(), "fallback"),
}
TEXTS = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from([*CASE_10, " ", "  ", "the", " the", "\n", "12345", "é", "e\u0301", "👩‍👩‍👧", "▁"])).map(
        "".join
    ),
)


def sizes(alignment: Alignment) -> list[tuple[int, int]]:
    """Tokens of the student and of the teacher in every group."""
    return [(len(mine), len(theirs)) for mine, theirs in alignment.groups]


def covered(vocabulary: Vocabulary, ids: list[int]) -> bytes:
    """The bytes of some ids."""
    return b"".join(vocabulary.pieces[index] or b"" for index in ids)


def test_a_character_split_over_tokens_is_grouped_by_its_bytes() -> None:
    """CASES 10: a 1-1, 😀 4-1, é 2-1, ' 数' 4-1: 1 + 4 + 2 + 4 = 11 tokens of the student, 4 of the teacher."""
    ids = BYTES.encode(CASE_10)
    assert len(ids) == 11
    found = align(ids, BYTES, WORDS, {})
    assert sizes(found) == [(1, 1), (4, 1), (2, 1), (4, 1)]
    assert (len(found.teacher_ids), found.cut) == (4, 0)
    assert [token for mine, _ in found.groups for token in mine] == list(range(11)), "every byte once"


def test_a_start_token_of_one_side_belongs_to_no_group() -> None:
    start = WORDS.tokenizer.bos_token_id
    assert start is not None
    theirs = [WORDS.piece(index) for index in [start, *WORDS.encode(CASE_10)]]
    mine = [BYTES.piece(index) for index in BYTES.encode(CASE_10)]
    groups = byte_groups(mine, theirs)
    assert [(len(a), b) for a, b in groups] == [(1, [1]), (4, [2]), (2, [3]), (4, [4])]


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_text_cut_inside_a_character_ends_before_it(kept: int) -> None:
    """'a' and `kept` of the emoji's four bytes: one group, and `kept` tokens left out."""
    found = align(BYTES.encode(CASE_10)[: 1 + kept], BYTES, WORDS, {})
    assert sizes(found) == [(1, 1)]
    assert found.cut == kept
    assert found.teacher_ids == WORDS.encode("a")


def test_single_ids_would_decode_to_replacement_marks() -> None:
    """What the alignment must not rest on: each of the emoji's four tokens alone is no text."""
    for index in BYTES.encode("😀"):
        assert BYTES.tokenizer.decode([index]) == "\ufffd"


@pytest.mark.parametrize("student", sorted(KINDS))
@pytest.mark.parametrize("teacher", sorted(KINDS))
@settings(max_examples=25, deadline=None)
@given(text=TEXTS)
def test_groups_cover_every_byte_once(student: str, teacher: str, text: str) -> None:
    mine, theirs = KINDS[student], KINDS[teacher]
    ids = mine.encode(text)
    found = align(ids, mine, theirs, {})
    content = covered(mine, ids)
    if "▁" not in text:  # sentencepiece writes it as it writes a space
        assert content == text.encode()
    if content == covered(theirs, found.teacher_ids):
        assert [token for group, _ in found.groups for token in group] == list(range(len(ids)))
        assert [token for _, group in found.groups for token in group] == list(range(len(found.teacher_ids)))
    for group, other in found.groups:
        assert covered(mine, [ids[n] for n in group]) == covered(theirs, [found.teacher_ids[n] for n in other])
        for end in range(1, len(group)):  # smallest: no inner boundary is shared
            inner = covered(mine, [ids[n] for n in group[:end]])
            lengths = [len(covered(theirs, [found.teacher_ids[n] for n in other[:k]])) for k in range(1, len(other))]
            assert len(inner) not in lengths


@pytest.mark.parametrize("student", ["bytes", "fallback"])
@settings(max_examples=25, deadline=None)
@given(text=TEXTS, kept=st.integers(0, 60))
def test_a_prefix_of_the_tokens_has_the_groups_of_the_whole_text_it_holds(student: str, text: str, kept: int) -> None:
    """Streaming: tokens cut anywhere align as the whole characters among them, and the rest is counted."""
    mine, theirs = KINDS[student], KINDS["large"]
    ids = mine.encode(text)[:kept]
    content = covered(mine, ids)
    whole = content.decode(errors="ignore")
    found = align(ids, mine, theirs, {})
    assert found.teacher_ids == (theirs.encode(whole) if whole else [])
    assert sum(len(group) for group, _ in found.groups) <= len(ids) - found.cut
    assert (found.cut > 0) == (len(whole.encode()) < len(content))


def test_special_tokens_meet_where_they_are_mapped_and_end_the_reading_where_not() -> None:
    pad, end = (BYTES.tokenizer.convert_tokens_to_ids(token) for token in ("<pad>", "<end>"))
    stop = WORDS.tokenizer.convert_tokens_to_ids("<stop>")
    ids = [*BYTES.encode("a"), end, *BYTES.encode("é")]
    mapped = align(ids, BYTES, WORDS, {end: stop})
    assert sizes(mapped) == [(1, 1), (1, 1), (2, 1)]
    assert mapped.teacher_ids[1] == stop
    assert sizes(align([*BYTES.encode("a"), pad, *BYTES.encode("é")], BYTES, WORDS, {end: stop})) == [(1, 1)]


def test_text_that_looks_like_a_special_token_is_text() -> None:
    found = align(BYTES.encode("a<stop>a"), BYTES, WORDS, {})
    assert WORDS.tokenizer.convert_tokens_to_ids("<stop>") not in found.teacher_ids
    assert covered(WORDS, found.teacher_ids) == b"a<stop>a"


def test_what_the_teacher_writes_otherwise_ends_the_groups() -> None:
    """The character tokenizer knows no 'é': groups hold up to there."""
    found = align(BYTES.encode("ab=é7"), BYTES, Vocabulary(characters(), "characters"), {})
    assert sizes(found) == [(1, 1)] * 3


def test_the_fallback_tokenizer_puts_no_space_in_front_of_a_continuation() -> None:
    vocabulary = KINDS["fallback"]
    plain = vocabulary.tokenizer("the", add_special_tokens=False)["input_ids"]
    assert covered(vocabulary, plain) == b" the", "as it writes a text's beginning"
    assert covered(vocabulary, vocabulary.encode("the")) == b"the"


def test_the_first_token_is_the_tokenizers_own_or_the_longest_prefix() -> None:
    vocabulary = KINDS["large"]
    (first, half) = vocabulary.first_of([b" the lazy", "数".encode()[:2]])
    assert first == vocabulary.encode(" the lazy")[0]
    assert half is not None and "数".encode()[:2].startswith(vocabulary.pieces[half] or b"?")
    assert Vocabulary(characters(), "c").first_of(["é".encode()]) == [None]


def test_tokenizers_whose_tokens_are_no_bytes_are_refused() -> None:
    pieces = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2})))
    with pytest.raises(ValueError, match=r"inner: its tokenizer \(WordPiece\) does not keep the spaces"):
        Vocabulary(pieces, "inner")

    class Slow(PreTrainedTokenizerBase):
        """A tokenizer without a tokenizer.json."""

    with pytest.raises(ValueError, match="inner: Slow is not a fast tokenizer"):
        Vocabulary(Slow(), "inner")

"""Which prompt stands where depends on the seed and the step alone; a file's rows become prompts as they stand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from opd.prompts import DataConfig, Encoder, JsonlSource, Prompts, Stream
from opd.records import Example
from tests.composing import write_jsonl
from tests.tiny import tokenizer

TOKENIZER = tokenizer()


@dataclass(frozen=True)
class Numbers:
    """Prompts "0", "1", ... as a source."""

    count: int
    start: int = 0

    def load(self) -> list[Example]:
        """The examples."""
        return [Example(str(n)) for n in range(self.start, self.start + self.count)]


def prompts(count: int = 7, seed: int = 0, **streams: Stream) -> Prompts:
    """Prompts "0" to "count - 1"; one stream of 3 per step unless streams are given."""
    return Prompts(DataConfig(Numbers(count), streams=streams or {"main": Stream(3)}), TOKENIZER, seed)


def order(source: Prompts, steps: range) -> list[str]:
    """The texts drawn in these steps."""
    return [prompt.text for step in steps for prompt in source.draw(step)]


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 12), per_step=st.integers(1, 15), seed=st.integers(0, 5))
def test_every_epoch_is_a_permutation_of_all_examples(count: int, per_step: int, seed: int) -> None:
    """Epochs follow each other without a gap, whether or not the examples divide by the prompts of a step."""
    source = prompts(count, seed, main=Stream(per_step))
    drawn = order(source, range(-(-3 * count // per_step)))
    for epoch in range(3):
        assert sorted(drawn[epoch * count : (epoch + 1) * count], key=int) == [str(n) for n in range(count)]


def test_epochs_differ_and_so_do_seeds() -> None:
    """20 examples: two equal orders by chance have probability 1 / 20!."""
    drawn = order(prompts(20, main=Stream(20)), range(3))
    epochs = [drawn[start : start + 20] for start in (0, 20, 40)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert order(prompts(20, seed=1, main=Stream(20)), range(1)) != epochs[0]


def test_the_order_depends_on_seed_and_step_alone() -> None:
    """A step drawn first, last, twice or by another process gives the same prompts."""
    straight = order(prompts(), range(10))
    for start in range(10):
        assert order(prompts(), range(start, 10)) == straight[3 * start :]
    used = prompts()
    backwards = [used.draw(step) for step in reversed(range(10))]
    assert [p.text for drawn in reversed(backwards) for p in drawn] == straight
    assert used.draw(4) == used.draw(4)


def test_prompts_of_a_step_have_ids_of_their_own_even_when_an_example_comes_twice() -> None:
    """2 examples, 5 prompts a step: one example stands in a step several times, and its answers are separate groups."""
    drawn = prompts(2, main=Stream(5)).draw(1)
    assert len({prompt.id for prompt in drawn}) == 5
    assert {prompt.text for prompt in drawn} == {"0", "1"}


def test_streams_have_their_own_size_samples_source_and_order() -> None:
    mixed = prompts(9, distill=Stream(6), reward=Stream(2, samples=4, source=Numbers(3, start=100)), more=Stream(6))
    drawn = mixed.draw(0)
    assert [(p.stream, p.samples) for p in drawn] == [("distill", 1)] * 6 + [("reward", 4)] * 2 + [("more", 1)] * 6
    assert {p.text for p in drawn if p.stream == "reward"} <= {"100", "101", "102"}
    own = [[p.text for step in range(3) for p in mixed.draw(step) if p.stream == name] for name in ("distill", "more")]
    assert own[0] != own[1], "two streams over the same examples do not go in step"
    alone = prompts(9, distill=Stream(6))
    assert [p.text for step in range(3) for p in alone.draw(step)] == own[0], "another stream does not move a stream"


def test_the_shared_source_is_not_read_when_every_stream_has_its_own() -> None:
    data = DataConfig(JsonlSource("/no/such.jsonl"), streams={"main": Stream(1, source=Numbers(1))})
    assert [p.text for p in Prompts(data, TOKENIZER, 0).draw(0)] == ["0"]


def test_streams_do_not_make_each_other_s_order_anew() -> None:
    """Within an epoch a stream keeps the list that it has shuffled once, whatever other streams draw in between."""
    mixed = prompts(20, one=Stream(2), other=Stream(2))
    mixed.draw(0)
    kept = [mixed._order(name, 0) for name in ("one", "other")]
    mixed.draw(1)
    assert all(mixed._order(name, 0) is order for name, order in zip(("one", "other"), kept, strict=True))


def test_evaluation_takes_the_first_held_out_prompts_in_file_order() -> None:
    source = Prompts(DataConfig(Numbers(1), heldout=Numbers(5, start=10)), TOKENIZER, seed=3)
    assert [(p.text, p.samples) for p in source.evaluation(3, 2)] == [("10", 2), ("11", 2), ("12", 2)]
    assert len(source.evaluation(99, 1)) == 5
    assert prompts().evaluation(4, 1) == []


# ----------------------------------------------------------------------------------------------------------- encoding


def test_a_text_is_tokenized_as_it_stands_and_a_chat_by_the_template(tmp_path: Path) -> None:
    """The tiny template joins the contents and adds `=`; ids are 3 + the place in `0123456789+-*/=^ a...`."""
    rows = [
        {"prompt": "1+2", "answer": 3, "source": "sums", "level": 1},
        {"messages": [{"role": "user", "content": "1+"}, {"role": "user", "content": "2"}]},
    ]
    read = Prompts(DataConfig(JsonlSource(str(write_jsonl(tmp_path / "a.jsonl", rows)))), TOKENIZER, 0).examples["main"]
    assert [ids for ids, _ in read] == [[4, 13, 5], [4, 13, 5, 17]]
    text, chat = (example for _, example in read)
    assert (text.answer, text.source, text.columns) == ("3", "sums", {"level": 1})
    assert (chat.answer, chat.source) == (None, "default")


def test_too_long_prompts_are_dropped_or_keep_their_end() -> None:
    """Limit 2 over "9", "10", ..., "99", "100", "101": the last two have three tokens."""
    source = Numbers(93, start=9)

    def encoded(too_long: str) -> list[list[int]]:
        data = DataConfig(source, max_prompt_tokens=2, too_long=too_long)  # type: ignore[arg-type]
        return [ids for ids, _ in Prompts(data, TOKENIZER, 0).examples["main"]]

    assert len(encoded("drop")) == 91 and max(map(len, encoded("drop"))) == 2
    kept = encoded("keep_end")
    assert len(kept) == 93
    assert kept[-2:] == [[3, 3], [3, 4]], "100 keeps 00, 101 keeps 01"


def test_exactly_one_start_token_when_the_template_writes_one_too() -> None:
    """A tokenizer that adds a start token, and a template that has written it: the prompt has it once (CASES 11)."""
    fast = tokenizer()
    fast.add_special_tokens({"bos_token": "<unk>"})
    fast.chat_template = "<unk><unk>{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.backend_tokenizer.pre_tokenizer = TOKENIZER.backend_tokenizer.pre_tokenizer

    @dataclass(frozen=True)
    class Chat:
        def load(self) -> list[Example]:
            return [Example([{"role": "user", "content": "12"}])]

    ids = Prompts(DataConfig(Chat()), fast, 0).examples["main"][0][0]
    assert ids == [2, 4, 5]


def test_a_line_separator_inside_a_text_does_not_end_the_line(tmp_path: Path) -> None:
    """U+2028, U+0085 and a form feed end lines for `str.splitlines`, but not in JSON lines."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "a\u2028b\u0085c"}\r\n\n{"prompt": "d"}', encoding="utf-8")
    assert [e.prompt for e in JsonlSource(str(tmp_path / "a.jsonl")).load()] == ["a\u2028b\u0085c", "d"]


def test_the_limit_reads_the_first_lines_only(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": str(n)} for n in range(5)])
    assert [example.prompt for example in JsonlSource(str(file), limit=2).load()] == ["0", "1"]
    with pytest.raises(ValueError, match="limit=0"):
        JsonlSource(str(file), limit=0)


def test_keeping_the_end_keeps_one_start_token_and_no_end_token_closes_a_prompt() -> None:
    """A tokenizer that writes `<s> ... </s>` around plain text, as T5's and some Llama tokenizers do."""
    fast = tokenizer()
    fast.add_special_tokens({"bos_token": "^", "eos_token": "z"})
    start, end = fast.bos_token_id, fast.eos_token_id
    fast.backend_tokenizer.post_processor = TemplateProcessing("^ $A z", special_tokens=[("^", start), ("z", end)])
    whole = Encoder(fast, 10, "error").encode(Numbers(1), "data.train")[0][0]
    assert whole == [start, fast.convert_tokens_to_ids("0")]
    cut = Encoder(fast, 3, "keep_end").encode(Numbers(1, start=12345), "data.train")[0][0]
    assert cut == [start, *fast.convert_tokens_to_ids(["4", "5"])]


def test_a_mark_in_front_of_a_file_is_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "1"}\n{"prompt": "2"}\n')
    assert [example.prompt for example in JsonlSource(str(tmp_path / "a.jsonl")).load()] == ["1", "2"]


@pytest.mark.parametrize(
    "row",
    [
        r'{"prompt": "1\ud83d"}',
        r'{"messages": [{"role": "user", "content": "\ude00"}]}',
        r'{"prompt": "1", "answer": "\ud83d 2"}',
    ],
)
def test_half_a_surrogate_pair_is_named_with_its_example(row: str, tmp_path: Path) -> None:
    """A whole pair is one character, and is read as one."""
    file = tmp_path / "a.jsonl"
    file.write_text(r'{"prompt": "1\ud83d\ude00", "answer": "\ud83d\ude00"}' + "\n")
    assert len(Encoder(TOKENIZER, 9, "error").encode(JsonlSource(str(file)), "data.heldout")) == 1
    with file.open("a") as more:
        more.write(row)
    with pytest.raises(ValueError, match=r"^data\.heldout: example 1 holds half of a surrogate pair"):
        Encoder(TOKENIZER, 9, "error").encode(JsonlSource(str(file)), "data.heldout")

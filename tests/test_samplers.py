"""Both samplers keep one contract: the weights' own log-probs, seeded draws, ids as sampled, one stop token.

Every model's folder holds generation settings (penalty, top_k, temperature) that no sampler may apply.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from opd.batching import make_batch
from opd.parity import check_parity
from opd.prompts import Encoder
from opd.records import Credit, Example, Prompt, Reward, Rollout
from opd.rows import Row
from opd.students import HFSampler, HFStudent, Sampler, SamplingParams, VLLMSampler
from opd.students.sampler import WeightNames
from opd.weight_sync import named_weights
from tests.tiny import save_model

TEXTS = ["1+2=", "abc^54321", "z", "12*(7-3"]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=12)
MODELS = [("qwen3", True), ("llama", False)]
MORE_MODELS = [pytest.param(pair, marks=pytest.mark.slow) for pair in [("qwen3", False), ("llama", True)]]
KINDS = [pytest.param("vllm", marks=pytest.mark.vllm), "hf"]


@dataclass(frozen=True)
class Tiny:
    """A student's folder and its weights as a trainer holds them."""

    student: HFStudent
    tokenizer: PreTrainedTokenizerFast
    model: nn.Module
    tied: bool


@pytest.fixture(scope="module", params=[*MODELS, *MORE_MODELS], ids=lambda p: f"{p[0]}-{'tied' if p[1] else 'untied'}")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A random model."""
    family, tied = request.param
    folder = save_model(tmp_path_factory.mktemp(family), family=family, tied=tied)
    settings = {"repetition_penalty": 1.7, "top_k": 2, "temperature": 0.3, "do_sample": True, "eos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    student = HFStudent(str(folder))
    return Tiny(student, student.tokenizer(), AutoModelForCausalLM.from_pretrained(folder).eval(), tied)


def started(kind: type[HFSampler] | type[VLLMSampler], tiny: Tiny) -> HFSampler | VLLMSampler:
    """A running sampler of the tiny model."""
    small = {"kv_cache_gib": 0.03, "max_num_seqs": 32} if kind is VLLMSampler else {}
    sampler = kind(**small)
    sampler.start(tiny.student, tiny.tokenizer, tiny.student.stop_ids(tiny.tokenizer), max_len=320)
    return sampler


@pytest.fixture(scope="module")
def hf(tiny: Tiny) -> Iterator[HFSampler]:
    """The transformers sampler."""
    sampler = started(HFSampler, tiny)
    yield sampler
    sampler.close()


@pytest.fixture(scope="module")
def vllm(tiny: Tiny) -> Iterator[VLLMSampler]:
    """A real engine; closed before that of the next model starts in this process."""
    sampler = started(VLLMSampler, tiny)
    yield sampler
    sampler.close()


@pytest.fixture(params=KINDS)
def sampler(request: pytest.FixtureRequest, tiny: Tiny) -> Iterator[HFSampler | VLLMSampler]:
    """Each kind in turn, under the start weights."""
    chosen = request.getfixturevalue(request.param)
    stop_ids = chosen.stop_ids
    yield chosen
    chosen.stop_ids, chosen.tokenizer = stop_ids, tiny.tokenizer
    if chosen.version != 0:
        chosen.sync(weights(tiny.model), version=0)


def prompts_of(tiny: Tiny, samples: int = 1, texts: Sequence[str] = TEXTS) -> list[Prompt]:
    """Prompts of different lengths."""
    return [
        Prompt(str(number), "main", tiny.tokenizer(text)["input_ids"], Example(text), samples)
        for number, text in enumerate(texts)
    ]


@torch.no_grad()
def full_logp(model: nn.Module, rollout: Rollout, temperature: float = 1.0) -> Tensor:
    """The trainer's log-probs [R, V] of the answer's positions: the row alone, no padding, no cache."""
    ids = torch.tensor([rollout.prompt.token_ids + rollout.token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    return torch.log_softmax(logits[len(rollout.prompt.token_ids) - 1 : -1] / temperature, -1)


def gaps(model: nn.Module, rollouts: Sequence[Rollout], temperature: float = 1.0) -> Tensor:
    """Trainer minus sampler log-prob of every sampled token."""
    parts = []
    for rollout in rollouts:
        chosen = torch.tensor(rollout.token_ids)[:, None]
        parts.append(full_logp(model, rollout, temperature).gather(-1, chosen)[:, 0] - torch.tensor(rollout.logp))
    return torch.cat(parts)


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a trainer sends."""
    return named_weights(model, lambda parameters: torch.no_grad())


def ids_of(rollouts: Sequence[Rollout]) -> dict[tuple[str, int], list[int]]:
    """(prompt, sample) -> sampled ids."""
    return {(rollout.prompt.id, rollout.sample_index): rollout.token_ids for rollout in rollouts}


@pytest.mark.vllm
def test_both_samplers_give_the_same_greedy_answers(tiny: Tiny, vllm: VLLMSampler, hf: HFSampler) -> None:
    assert isinstance(vllm, Sampler) and isinstance(hf, Sampler)
    mine, theirs = (sampler.sample(prompts_of(tiny), GREEDY, seed=0) for sampler in (vllm, hf))
    for one, other in zip(mine, theirs, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.text, one.finish, one.prompt) == (other.text, other.finish, other.prompt)
        torch.testing.assert_close(torch.tensor(one.logp), torch.tensor(other.logp), atol=1e-4, rtol=0)


def test_greedy_answers_are_the_likeliest_tokens_under_the_untempered_softmax(
    tiny: Tiny, sampler: HFSampler | VLLMSampler
) -> None:
    rollouts = sampler.sample(prompts_of(tiny), GREEDY, seed=0)
    for rollout in rollouts:
        assert rollout.token_ids == full_logp(tiny.model, rollout).argmax(-1).tolist()
    assert gaps(tiny.model, rollouts).abs().max() < 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.5])
def test_logp_is_the_log_softmax_of_logits_over_temperature(
    tiny: Tiny, sampler: HFSampler | VLLMSampler, temperature: float
) -> None:
    """Never the softmax at temperature 1 (raw), never that divided by T: for logits (2, 1, 0) at T = 0.5 the score of
    token 0 is 4 - ln(e^4 + e^2 + 1) = -0.143; raw would be -0.408, divided -0.815."""
    rollouts = sampler.sample(prompts_of(tiny, samples=4), replace(SAMPLED, temperature=temperature), seed=1)
    assert gaps(tiny.model, rollouts, temperature).abs().max() < 1e-4
    if temperature != 1.0:
        assert gaps(tiny.model, rollouts).abs().max() > 0.05


@pytest.mark.parametrize("k", [1, 3, 12])
def test_the_likeliest_tokens_of_every_position(tiny: Tiny, sampler: HFSampler | VLLMSampler, k: int) -> None:
    """Those of the trainer's own softmax at the sampling temperature, whether the sampled token is one or not."""
    params = replace(SAMPLED, temperature=1.5, top_logprobs=k)
    rollouts = sampler.sample(prompts_of(tiny, samples=4), params, seed=1)
    assert gaps(tiny.model, rollouts, 1.5).abs().max() < 1e-4
    outside = 0
    for rollout in rollouts:
        logp = full_logp(tiny.model, rollout, 1.5)
        top = rollout.sampler_top
        assert top is not None and top.ids.shape == (len(rollout.token_ids), k)
        torch.testing.assert_close(top.logp, logp.topk(k).values, atol=1e-4, rtol=0)
        torch.testing.assert_close(logp.gather(-1, top.ids), top.logp, atol=1e-4, rtol=0)
        outside += sum(token not in ids for token, ids in zip(rollout.token_ids, top.ids.tolist(), strict=True))
    assert outside > 0
    assert all(rollout.sampler_top is None for rollout in sampler.sample(prompts_of(tiny), SAMPLED, seed=1))


def truncated(p: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """The definition, for one distribution [V]: drop below min_p * max, keep the k likeliest of those, then the fewest
    that hold top_p of the mass; the rest is divided by its sum."""
    p = torch.where(p >= min_p * p.max(), p, 0.0)
    order = p.argsort(descending=True)
    if top_k:
        p[order[top_k:]] = 0.0
    p = p / p.sum()
    before = p[order].cumsum(0) - p[order]
    p[order[before >= top_p]] = 0.0
    return p / p.sum()


@pytest.mark.parametrize(
    "cut", [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"min_p": 0.1, "top_k": 6, "top_p": 0.8}], ids=str
)
def test_logp_of_truncated_sampling_is_that_of_the_truncated_distribution(
    tiny: Tiny, sampler: HFSampler | VLLMSampler, cut: dict[str, float]
) -> None:
    params = replace(SAMPLED, temperature=0.8, **cut)
    rollouts = sampler.sample(prompts_of(tiny, samples=4), params, seed=2)
    for rollout in rollouts:
        full = full_logp(tiny.model, rollout, 0.8).exp()
        rows = zip(full, rollout.token_ids, strict=True)
        expected = [truncated(row, **cut)[token].log().item() for row, token in rows]
        assert rollout.logp == pytest.approx(expected, abs=1e-4)
    assert gaps(tiny.model, rollouts, 0.8).abs().max() > 0.05


def test_draws_follow_the_distribution(tiny: Tiny, sampler: HFSampler | VLLMSampler) -> None:
    """First tokens of 600 samples: each frequency within 5 standard deviations, sqrt(p (1 - p) / 600), of p."""
    prompt = prompts_of(tiny, samples=600)[0]
    rollouts = sampler.sample([prompt], replace(SAMPLED, max_tokens=1), seed=3)
    p = full_logp(tiny.model, rollouts[0])[0].exp()
    counts = torch.bincount(torch.tensor([rollout.token_ids[0] for rollout in rollouts]), minlength=len(p))
    assert ((counts / 600 - p).abs() < 5 * (p * (1 - p) / 600).sqrt() + 1e-3).all()


def test_a_draw_depends_on_seed_prompt_and_sample_index_alone(tiny: Tiny, sampler: HFSampler | VLLMSampler) -> None:
    sampler.stop_ids = []  # every answer has 12 tokens
    prompts = prompts_of(tiny, samples=3)
    drawn = ids_of(sampler.sample(prompts, SAMPLED, seed=4))
    assert ids_of(sampler.sample(prompts, SAMPLED, seed=4)) == drawn
    assert ids_of(sampler.sample(prompts[::-1], SAMPLED, seed=4)) == drawn
    alone = [ids_of(sampler.sample([prompt], SAMPLED, seed=4)) for prompt in prompts]
    assert {key: ids for part in alone for key, ids in part.items()} == drawn
    other = ids_of(sampler.sample(prompts, SAMPLED, seed=5))
    assert all(other[key] != drawn[key] for key in drawn)
    for prompt in prompts:
        assert len({tuple(drawn[prompt.id, index]) for index in range(3)}) == 3


def test_hf_sampler_batches_do_not_change_the_draws(tiny: Tiny, hf: HFSampler) -> None:
    prompts = prompts_of(tiny, samples=2)
    other = HFSampler(batch_size=3)
    other.attach(hf.model, tiny.tokenizer, hf.stop_ids)
    state = torch.get_rng_state()
    assert ids_of(other.sample(prompts, SAMPLED, seed=6)) == ids_of(hf.sample(prompts, SAMPLED, seed=6))
    assert torch.equal(torch.get_rng_state(), state), "sampling must not move the trainer's random numbers"


def test_rollouts_come_in_order_of_prompts_and_samples(tiny: Tiny, sampler: HFSampler | VLLMSampler) -> None:
    rollouts = sampler.sample(prompts_of(tiny, samples=2), SAMPLED, seed=0)
    assert [(rollout.prompt.id, rollout.sample_index) for rollout in rollouts] == [
        (str(prompt), index) for prompt in range(len(TEXTS)) for index in range(2)
    ]


def test_no_prompts_give_no_rollouts(sampler: HFSampler | VLLMSampler) -> None:
    assert sampler.sample([], SAMPLED, seed=0) == []


def test_an_answer_holds_one_stop_id_at_its_end_or_none(tiny: Tiny, sampler: HFSampler | VLLMSampler) -> None:
    """Three ids end an answer here, the tokenizer's own end token (1) is not among them."""
    sampler.stop_ids = [5, 20, 33]
    rollouts = sampler.sample(prompts_of(tiny, samples=16), SAMPLED, seed=7)
    ends = {rollout.token_ids[-1] for rollout in rollouts if rollout.finish == "stop"}
    assert ends == {5, 20, 33}
    for rollout in rollouts:
        stops = [token for token in rollout.token_ids if token in sampler.stop_ids]
        assert stops == ([rollout.token_ids[-1]] if rollout.finish == "stop" else [])
        assert rollout.finish == "stop" or len(rollout.token_ids) == SAMPLED.max_tokens
        assert len(rollout.logp) == len(rollout.token_ids)
    assert {rollout.finish for rollout in rollouts} == {"stop", "length"}
    assert any(1 in rollout.token_ids[:-1] for rollout in rollouts)


def test_a_stop_id_as_the_last_token_that_fits_is_a_stop(tiny: Tiny, sampler: HFSampler | VLLMSampler) -> None:
    first = sampler.sample(prompts_of(tiny)[:1], replace(GREEDY, max_tokens=1), seed=0)[0]
    assert first.finish == "length"
    sampler.stop_ids = first.token_ids
    assert sampler.sample(prompts_of(tiny)[:1], replace(GREEDY, max_tokens=1), seed=0)[0].finish == "stop"


def test_text_leaves_special_tokens_out(tiny: Tiny, sampler: HFSampler | VLLMSampler) -> None:
    rollouts = sampler.sample(prompts_of(tiny, samples=16), SAMPLED, seed=7)
    assert any(rollout.token_ids[-1] == 1 for rollout in rollouts)
    assert any(0 in rollout.token_ids or 2 in rollout.token_ids for rollout in rollouts)
    assert not any(special in rollout.text for rollout in rollouts for special in ("$", "<pad>", "<unk>"))


def merging_tokenizer(tiny: Tiny, first: int, second: int) -> PreTrainedTokenizerFast:
    """The tiny tokenizer, but for two characters that it encodes as one token (id 46) when they stand side by side."""
    pieces = tiny.tokenizer.convert_ids_to_tokens([first, second])
    core = Tokenizer(models.WordLevel(tiny.tokenizer.get_vocab() | {"".join(pieces): 46}, unk_token="<unk>"))
    pattern = "".join(f"[{piece}]" if piece != "^" else r"\^" for piece in pieces)
    core.pre_tokenizer = pre_tokenizers.Split(Regex(f"{pattern}|."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="$", pad_token="<pad>", unk_token="<unk>")


def test_sampled_ids_are_the_trained_ids(tiny: Tiny, sampler: HFSampler | VLLMSampler) -> None:
    """The answer begins [a][b]; its tokenizer would write "ab" as one token. The batch holds [a][b]."""
    drawn = sampler.sample(prompts_of(tiny, samples=16), SAMPLED, seed=8)
    plain = range(3, 46)  # ids of characters
    place = next(i for i, r in enumerate(drawn) if len(r.token_ids) > 4 and set(r.token_ids[:2]) <= set(plain))
    sampler.tokenizer = merging_tokenizer(tiny, *drawn[place].token_ids[:2])
    rollout = sampler.sample(prompts_of(tiny, samples=16), SAMPLED, seed=8)[place]
    assert rollout.token_ids == drawn[place].token_ids
    assert sampler.tokenizer(rollout.text)["input_ids"][0] == 46
    row = Row(rollout, Reward(None), Credit(None), {}, frozenset())
    micro = make_batch([row], [], 1000, pad_id=0).micro_batches[0]
    assert micro.input_ids[0].tolist() == rollout.prompt.token_ids + rollout.token_ids
    assert micro.tokens.token_ids.tolist() == rollout.token_ids
    assert micro.tokens.sampler_logp.tolist() == pytest.approx(rollout.logp)
    assert gaps(tiny.model, [rollout]).abs().max() < 1e-4


@torch.no_grad()
def moved(model: nn.Module, by: float) -> nn.Module:
    """A copy whose every weight is changed."""
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(9)
    for parameter in copy.parameters():
        parameter += by * torch.randn(parameter.shape, generator=generator)
    return copy


def test_answers_follow_the_weights_that_were_sent(tiny: Tiny, sampler: HFSampler | VLLMSampler) -> None:
    """The new log-probs are the new model's (1e-4), more than 0.1 nats away from the old model's on the same answer."""
    before = sampler.sample(prompts_of(tiny), GREEDY, seed=0)
    assert {rollout.version for rollout in before} == {0}
    changed = moved(tiny.model, 0.05)
    sampler.sync(weights(changed), version=7)
    after = sampler.sample(prompts_of(tiny), GREEDY, seed=0)
    assert {rollout.version for rollout in after} == {7}
    assert gaps(changed, after).abs().max() < 1e-4
    assert gaps(tiny.model, after).abs().max() > 0.1
    sampler.sync(weights(tiny.model), version=8)
    again = sampler.sample(prompts_of(tiny), GREEDY, seed=0)
    assert [(r.token_ids, r.logp) for r in again] == [(r.token_ids, pytest.approx(r.logp, abs=1e-5)) for r in before]


def test_every_single_weight_reaches_the_sampler(tiny: Tiny, sampler: HFSampler | VLLMSampler) -> None:
    """One parameter is changed at a time (a tied one under both names): each moves the log-probs, to the trainer's."""
    prompt = prompts_of(tiny)[1:2]
    for name, _ in tiny.model.named_parameters():
        changed = moved(tiny.model, 0.0)
        with torch.no_grad():
            changed.get_parameter(name).add_(0.3 * torch.randn(changed.get_parameter(name).shape))
        sampler.sync(weights(changed), version=1)
        after = sampler.sample(prompt, GREEDY, seed=0)
        assert gaps(changed, after).abs().max() < 2e-4, name
        assert gaps(tiny.model, after).abs().max() > 1e-3, name


@pytest.mark.vllm
def test_no_prefix_of_old_weights_is_reused(tiny: Tiny, vllm: VLLMSampler) -> None:
    """A prompt of 200 tokens, longer than a cache block: cached before the update, computed anew after it."""
    prompts = prompts_of(tiny, texts=["0123456789" * 20])

    def cached() -> int:
        return vllm.engine.generate([{"prompt_token_ids": prompts[0].token_ids}], use_tqdm=False)[0].num_cached_tokens

    vllm.sample(prompts, GREEDY, seed=0)
    assert cached() > 0
    changed = moved(tiny.model, 0.2)
    vllm.sync(weights(changed), version=1)
    assert gaps(changed, vllm.sample(prompts, GREEDY, seed=0)).abs().max() < 2e-4
    assert cached() > 0
    vllm.sync(weights(tiny.model), version=0)
    assert cached() == 0


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "lm_head.weight"])
def test_a_weight_that_is_left_out_is_an_error(tiny: Tiny, sampler: HFSampler | VLLMSampler, name: str) -> None:
    incomplete = [(other, tensor) for other, tensor in weights(tiny.model) if other != name]
    with pytest.raises(RuntimeError, match=rf"missing: \['{name}'\]"):
        sampler.sync(incomplete, version=3)
    assert sampler.version == 0


def test_an_unknown_weight_is_an_error(tiny: Tiny, sampler: HFSampler | VLLMSampler) -> None:
    stranger = ("model.layers.0.self_attn.q_proj.lora_A.weight", torch.zeros(2, 2))
    with pytest.raises(RuntimeError, match=r"unknown: \['model\.layers\.0\.self_attn\.q_proj\.lora_A\.weight'\]"):
        sampler.sync([*weights(tiny.model), stranger], version=3)
    assert sampler.version == 0


class RefusingEngine:
    """An engine that does not clear its prefix cache, as vLLM does while a request runs."""

    def collective_rpc(self, method: str, kwargs: dict[str, Iterator[tuple[str, Tensor]]]) -> None:
        """Takes the weights."""
        assert method == "reload_weights"
        assert len(list(kwargs["weights_iterator"])) == 1

    def reset_prefix_cache(self) -> bool:
        """Refuses."""
        return False


def test_a_refused_cache_reset_stops_the_run() -> None:
    sampler = VLLMSampler()
    sampler.engine, sampler.names, sampler.version = RefusingEngine(), WeightNames(["w"]), 4
    with pytest.raises(RuntimeError, match="refused to clear its prefix cache"):
        sampler.sync([("w", torch.zeros(1))], version=5)
    assert sampler.version == 4


def test_parity_holds_after_a_sync_and_breaks_without(tiny: Tiny, sampler: HFSampler | VLLMSampler) -> None:
    changed = moved(tiny.model, 0.05)
    rollouts = sampler.sample(prompts_of(tiny, samples=4), SAMPLED, seed=0)
    assert check_parity(gaps(tiny.model, rollouts), limit=1e-3) < 1e-4
    with pytest.raises(RuntimeError, match=r"parity\.limit"):  # an engine that gives raw log-probs at T = 0.5
        check_parity(gaps(tiny.model, rollouts, temperature=0.5), limit=0.15)
    with pytest.raises(RuntimeError, match=r"parity\.limit=0\.15"):
        check_parity(gaps(changed, rollouts), limit=0.15)
    sampler.sync(weights(changed), version=1)
    assert check_parity(gaps(changed, sampler.sample(prompts_of(tiny, samples=4), SAMPLED, seed=0)), limit=1e-3) < 1e-4


def adapted(tiny: Tiny, **settings: object) -> nn.Module:
    """A LoRA student in training mode, as an engine gets it, whose adapter changes the answers."""
    layers = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]
    model = replace(tiny.student, lora=LoraConfig(r=4, lora_alpha=8, target_modules=layers, **settings)).load()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_lora_student_reaches_the_sampler(tiny: Tiny, sampler: HFSampler | VLLMSampler, dropout: float) -> None:
    """The first ratio is 1 (1e-3) in training mode, whatever the adapter's dropout."""
    model = adapted(tiny, lora_dropout=dropout)
    assert model.training
    sampler.sync(weights(model), version=1)
    rollouts = sampler.sample(prompts_of(tiny, samples=4), SAMPLED, seed=0)
    assert gaps(model, rollouts).abs().max() < 1e-4
    assert gaps(tiny.model, rollouts).abs().max() > 0.1
    assert (gaps(model, rollouts).exp() - 1).abs().max() < 1e-3


def test_hf_sampler_with_learned_positions_and_ragged_prompts(tiny: Tiny) -> None:
    """Left padding must not shift positions: every row's log-probs are those of the row alone."""
    torch.manual_seed(0)
    shape = {"vocab_size": 48, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=1, initializer_range=0.3)).eval()
    sampler = HFSampler()
    sampler.attach(model, tiny.tokenizer, [1])
    rollouts = sampler.sample(prompts_of(tiny, samples=2), SAMPLED, seed=0)
    assert gaps(model, rollouts).abs().max() < 1e-4


def test_stop_ids_are_the_generation_configs_and_the_tokenizers(tmp_path: Path) -> None:
    student = HFStudent(str(save_model(tmp_path)))
    tokenizer = student.tokenizer()
    assert student.stop_ids(tokenizer) == [1]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 4]}))
    assert student.stop_ids(tokenizer) == [1, 4, 9]
    (tmp_path / "generation_config.json").unlink()
    assert student.stop_ids(tokenizer) == [1]


@dataclass(frozen=True)
class Listed:
    """A source of given examples."""

    examples: list[Example]

    def load(self) -> list[Example]:
        """The examples."""
        return self.examples


def starting_tokenizer(adds: bool) -> PreTrainedTokenizerFast:
    """Characters, a start token <s> that the chat template writes, and that the tokenizer adds if `adds`."""
    vocabulary = {"<pad>": 0, "$": 1, "<s>": 2} | {character: number + 3 for number, character in enumerate("abc=")}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    if adds:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    fast = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="$", pad_token="<pad>")
    fast.chat_template = "<s>{% for m in messages %}{{ m['content'] }}{% endfor %}="
    return fast


@pytest.mark.parametrize("adds", [True, False])
def test_a_prompt_holds_exactly_one_start_token(adds: bool) -> None:
    """Ids: a=3, b=4, '='=6. A template that writes <s> beside a tokenizer that adds it; text that begins with <s>."""
    encoder = Encoder(starting_tokenizer(adds), limit=100, too_long="error")
    examples = [Example([{"role": "user", "content": "ab"}]), Example("<s>ab="), Example("ab=")]
    chat, written, plain = (ids for ids, _ in encoder.encode(Listed(examples), "data.train"))
    assert chat == written == [2, 3, 4, 6]
    assert plain == ([2] if adds else []) + [3, 4, 6]

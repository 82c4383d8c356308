"""The student as its own teacher: other weights of its, or another view of the prompt, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedTokenizerBase

from opd.heads import Head
from opd.losses import Need
from opd.losses.protocol import needs
from opd.prompts import Encoder
from opd.records import Example, FullVocab, Mean, Prompt, Reward, Rollout, TeacherScores
from opd.students import HFSampler, HFStudent, SamplingParams
from opd.teachers.local import LocalTeacher, response_states
from opd.teachers.privileged import View, correct_siblings, quotes
from opd.teachers.self_weights import Borrowed, Copy, Weights

Kind = Literal["frozen", "ema", "refresh", "adapter_off", "live"]
LEAK_TOKENS = 256  # whose logits exist at one time


@dataclass
class SelfTeacher:
    """Scores the student's own token ids after a prompt that may say more than the student's: only that part differs.

    A row for which the template's information does not exist, or whose longer prompt does not fit the model, has no
    score. `teacher/<name>/scored` is the share of the others. Sources: OPSD (2601.18734), SDPO (2601.20802), SDFT
    (2601.19897).

    Args:
        student: the run's own, `${student}`.
        weights: `frozen`, those of the start; `ema`, a running mean of the student's; `refresh`, the student's of the
            last refresh; `adapter_off`, a LoRA student's base, without a copy; `live`, the student's of now.
        template: Jinja for the prompt that the teacher gets, see `privileged.View`; null for the student's prompt.
        ema_share: of the student that enters the running mean at every step.
        refresh_every: steps between two refreshes.
        correct_from: reward from which an answer may be shown as a sibling's correct one.
        leak_every: steps between two leak tests, 0 for none: the same tokens are scored after the student's prompt too.
            `teacher/<name>/leak` is the mean size of the difference (nats), `teacher/<name>/quoted` the share of the
            answers that repeat what only the teacher's prompt says.
        quote_tokens: consecutive tokens that make a quotation.
        micro_batch_tokens: padded tokens per forward pass.
    """

    student: HFStudent
    weights: Kind = "frozen"
    template: str | None = None
    ema_share: float = 0.05
    refresh_every: int = 10
    correct_from: float = 0.5
    leak_every: int = 0
    quote_tokens: int = 8
    micro_batch_tokens: int = 16384
    provides: ClassVar[frozenset[Need]] = needs("full_vocab")

    def __post_init__(self) -> None:
        self._view = None if self.template is None else View(self.template)
        self._metrics: dict[str, Mean] = {}
        if not 0.0 < self.ema_share <= 1.0:
            raise ValueError(f"ema_share={self.ema_share}: must lie above 0 and be at most 1")
        for key, least in (("refresh_every", 1), ("leak_every", 0), ("quote_tokens", 1)):
            if vars(self)[key] < least:
                raise ValueError(f"{key}={vars(self)[key]}: must be at least {least}")

    @property
    def borrows_student(self) -> bool:
        """Whether it runs the student's own module."""
        return self.weights in ("adapter_off", "live")

    @property
    def is_live(self) -> bool:
        """Whether its weights are the student's at every step."""
        follows_closely = {"ema": self.ema_share == 1.0, "refresh": self.refresh_every == 1}
        return self.weights == "live" or follows_closely.get(self.weights, False)

    @property
    def reads_siblings(self) -> bool:
        """Whether it shows correct answers of the group."""
        return self._view is not None and self._view.reads_siblings

    @property
    def reads_verdicts(self) -> bool:
        """Whether it needs rewards."""
        return self._view is not None and self._view.reads_verdicts

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The student's."""
        return self.student.tokenizer()

    def check_examples(self, examples: Sequence[Example]) -> None:
        """Tries the template on the data, as far as it does not wait for verdicts.

        Raises:
            ValueError: it fits no example, or shows a live teacher nothing that the student does not see.
        """
        if self._view is None or self.reads_verdicts:
            return
        first = next(((e, seen) for e in examples if (seen := self._view.of(e, Reward(None), None)) is not None), None)
        if first is None:
            raise ValueError(
                f"template: none of the {len(examples)} examples has all that it uses (answer, columns): correct it, "
                "or make what may be missing optional by `is defined`"
            )
        if self.is_live and first[0].prompt == first[1].prompt:
            raise ValueError(
                "template: shows the teacher the student's own prompt, and its weights are the student's of now, so "
                "that there is nothing to learn: show it more, or use other weights"
            )

    def attach(self, student: nn.Module) -> None:
        """Gives it the module in training, before `start`."""
        self._student = student

    def start(self) -> None:
        """Copies the student's start weights, where it needs weights of its own."""
        text = AutoConfig.from_pretrained(
            self.student.model, trust_remote_code=self.student.trust_remote_code
        ).get_text_config()
        self._positions = int(text.to_dict().get("max_position_embeddings") or 2**31)
        self._tokenizer = self.tokenizer()
        self._encoder = Encoder(self._tokenizer, self._positions, "error")
        if self.borrows_student:
            self._held: Copy | Borrowed = Borrowed(self._student, self.weights == "adapter_off")
            return
        student = self.student
        start = LocalTeacher(
            student.model, student.dtype, attention=student.attention, trust_remote_code=student.trust_remote_code
        )
        start.start()
        every = {"ema": 1, "refresh": self.refresh_every}.get(self.weights)
        self._held = Copy(start.network, every, self.ema_share if self.weights == "ema" else 1.0)

    def head(self) -> Head:
        """Of its weights; what follows the student is changed in place."""
        return self._held.head()

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores | None]:
        """As `score_judged`, without verdicts."""
        return self.score_judged(rollouts, [Reward(None)] * len(rollouts))

    def score_judged(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> list[TeacherScores | None]:
        """The hidden states [R, H] that predict each response token after the teacher's prompt."""
        views = self._views(rollouts, rewards)
        seen = [(rollout, view) for rollout, view in zip(rollouts, views, strict=True) if view is not None]
        states = self._states([view for _, view in seen])
        self._metrics = {"scored": Mean(float(len(seen)), float(len(rollouts)))}
        if self._view is not None and self.leak_every and seen and rollouts[0].version % self.leak_every == 0:
            self._metrics |= self._leak(seen, states)
        given = iter(states)
        return [None if view is None else FullVocab(next(given)) for view in views]

    def metrics(self) -> dict[str, Mean]:
        """Of the last rollouts: `scored`, and where a leak test was due `leak` and `quoted`."""
        return dict(self._metrics)

    def _states(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        with self._held.lent() as network:
            return response_states(network.get_decoder(), rollouts, self.micro_batch_tokens)

    def _views(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> list[Rollout | None]:
        """The rollouts after the teacher's prompt; None where that does not exist or does not fit."""
        siblings = correct_siblings(rollouts, rewards, self.correct_from)
        views: list[Rollout | None] = []
        for rollout, reward, sibling in zip(rollouts, rewards, siblings, strict=True):
            prompt = self._privileged(rollout.prompt, reward, sibling)
            fits = prompt is not None and len(prompt.token_ids) + len(rollout.token_ids) <= self._positions
            views.append(replace(rollout, prompt=prompt) if prompt is not None and fits else None)
        return views

    def _privileged(self, prompt: Prompt, reward: Reward, sibling: str | None) -> Prompt | None:
        if self._view is None:
            return prompt
        example = self._view.of(prompt.example, reward, sibling)
        ids = [] if example is None else self._encoder.ids(example, "teacher.template")
        return replace(prompt, token_ids=ids, example=example) if example is not None and ids else None

    def _leak(self, seen: Sequence[tuple[Rollout, Rollout]], states: Sequence[Tensor]) -> dict[str, Mean]:
        """Of (rollout, the same after the teacher's prompt) pairs, and the states of the latter."""
        total, tokens, quoted = 0.0, 0, 0
        for (rollout, view), told, plain in zip(seen, states, self._states([r for r, _ in seen]), strict=True):
            gaps = self._token_logp(told, rollout) - self._token_logp(plain, rollout)
            total, tokens = total + gaps.abs().double().sum().item(), tokens + len(gaps)
            quoted += quotes(rollout.token_ids, view.prompt.token_ids, rollout.prompt.token_ids, self.quote_tokens)
        return {"leak": Mean(total, float(tokens)), "quoted": Mean(float(quoted), float(len(seen)))}

    @torch.no_grad()
    def _token_logp(self, hidden: Tensor, rollout: Rollout) -> Tensor:
        """Log-probabilities [R] of the response's tokens."""
        head = self.head()
        ids = torch.tensor(rollout.token_ids, device=hidden.device)
        parts = [
            torch.log_softmax(head.logits(states), -1).gather(-1, tokens[:, None])[:, 0]
            for states, tokens in zip(hidden.split(LEAK_TOKENS), ids.split(LEAK_TOKENS), strict=True)
        ]
        return torch.cat(parts)

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams, seed: int) -> list[Rollout]:
        """Its own answers after its own prompts, under the student's; empty and aborted where it has no view."""
        views = [self._privileged(prompt, Reward(None), None) for prompt in prompts]
        sampler = HFSampler()
        with self._held.lent() as network:
            sampler.attach(network, self._tokenizer, self.student.stop_ids(self._tokenizer))
            drawn = iter(sampler.sample([view for view in views if view is not None], params, seed))
        return [
            Rollout(prompt, index, [], [], "", "aborted", 0)
            if view is None
            else replace(next(drawn), prompt=prompt, version=0)
            for prompt, view in zip(prompts, views, strict=True)
            for index in range(prompt.samples)
        ]

    def follow(self, weights: Weights, step: int) -> None:
        """After the update to `step`."""
        self._held.follow(weights, step)

    def state(self) -> dict[str, Tensor]:
        """Weights that followed the student so far."""
        return self._held.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Goes on from what `state` gave."""
        self._held.restore(state)

    def close(self) -> None:
        """Drops the weights."""
        del self._held

"""What a teacher behind a wire costs: bytes and time per token, and what bfloat16 hidden states do to the gradient.

    make bench-wire [ARGS="--hidden 256 --vocabulary 32768 --layers 2 --rows 64 --length 64 --repeats 3"]

A random teacher of the given size is served by `opd serve-teacher`, first its hidden states, then its
log-probabilities, and scores the same rows as the local one. Bytes are counted in the answers' bodies and descriptions.
Times are medians: of wall time, and of CPU time in this process and in the servers together. The last table takes the
demo student and teacher, and compares loss and gradient (in all of the student's weights) under exact hidden states and
rounded ones. Servers take a minute or two to start.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from opd.batching import make_batch
from opd.demo.addition import Addition
from opd.heads import split_model
from opd.losses import ReverseKL
from opd.objective import Objective, streamed_loss
from opd.quiet import quiet_libraries
from opd.ranks import free_port
from opd.records import Credit, Example, FullVocab, Prompt, Reward, Rollout, TeacherScores
from opd.remote import RemoteConfig
from opd.resolvers import demo_model
from opd.rows import Row
from opd.students import HFSampler, HFStudent, SamplingParams
from opd.teachers import LocalTeacher, ScorerTeacher, ServedTeacher, Teacher
from opd.terms import Term

TOP_K = 64
TICKS = os.sysconf("SC_CLK_TCK")
LARGE = (4096, 151_936)  # hidden size and vocabulary of an 8B model, for the bytes that need no measurement


@dataclass(frozen=True)
class Cost:
    """Of one way to score, per scored token."""

    way: str
    bytes_per_token: float
    tokens_per_second: float
    cpu_ms: float  # of 1,000 tokens, trainer and server together


def random_teacher(folder: Path, hidden: int, vocabulary: int, layers: int) -> None:
    """A Qwen3 of the given size, with the demo's tokenizer files beside it."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64), num_key_value_heads=max(1, hidden // 64), head_dim=64,
        max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo_model("teacher")).save_pretrained(folder)


@contextmanager
def server(model: Path, gives: str) -> Iterator[tuple[str, int]]:
    """Address and process group of a server that has started."""
    port = free_port()
    settings = [f"model={model}", f"port={port}", f"gives={gives}", "dtype=float32", f"max_logprobs={TOP_K}"]
    process = subprocess.Popen([sys.executable, "-m", "opd", "serve-teacher", *settings], start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        while True:
            if process.poll() is not None:
                raise RuntimeError("the server ended")
            try:
                httpx.get(f"{url}/health", timeout=5.0).raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.5)
        yield url, process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def cpu_of_group(group: int | None) -> float:
    """CPU seconds of all processes of a process group."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat") if group else ():
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[2]) == group:
            total += int(fields[11]) + int(fields[12])
    return total / TICKS


def cost(
    way: str,
    teacher: Teacher,
    rollouts: Sequence[Rollout],
    tokens: int,
    size: float,
    repeats: int,
    group: int | None = None,
) -> Cost:
    """Medians over the repeats, after one call that warms up."""
    teacher.score(rollouts)
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time() + cpu_of_group(group)
        teacher.score(rollouts)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() + cpu_of_group(group) - cpu)
    return Cost(way, size, tokens / statistics.median(walls), 1e6 * statistics.median(cpus) / tokens)


def answer_bytes(url: str, path: str, body: dict[str, object]) -> int:
    """Of the body and the description of one answer."""
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    response = httpx.post(url + path, json={**body, "model": model}, timeout=300.0).raise_for_status()
    return len(response.content) + len(response.headers.get("metadata", ""))


def costs(folder: Path, rollouts: Sequence[Rollout], repeats: int) -> list[Cost]:
    """Local, hidden states on the wire, log-probabilities on the wire."""
    sequences = [rollout.prompt.token_ids + rollout.token_ids for rollout in rollouts]
    tokens = sum(map(len, sequences))
    local = LocalTeacher(str(folder))
    local.start()
    found = [cost("local, no wire", local, rollouts, tokens, 0.0, repeats)]
    local.close()
    with server(folder, "hidden") as (url, group):
        for dtype in ("float32", "bfloat16"):
            asked = {"input": sequences, "task": "token_embed", "encoding_format": "bytes", "embed_dtype": dtype}
            size = answer_bytes(url, "/pooling", {**asked, "use_activation": False}) / tokens
            served = ServedTeacher(str(folder), RemoteConfig([url]), wire_dtype=dtype)
            served.start()
            found.append(cost(f"hidden states, {dtype}", served, rollouts, tokens, size, repeats, group))
            served.close()
    with server(folder, "logprobs") as (url, group):
        for k in (TOP_K, 0):
            asked = {"prompt": sequences, "prompt_logprobs": k, "max_tokens": 1}
            size = answer_bytes(url, "/v1/completions", asked) / tokens
            scorer = ScorerTeacher(str(folder), RemoteConfig([url]), k=k)
            scorer.start()
            way = f"top {k} as JSON" if k else "sampled token as JSON"
            found.append(cost(way, scorer, rollouts, tokens, size, repeats, group))
            scorer.close()
    return found


def random_rollouts(rows: int, length: int, vocabulary: int) -> list[Rollout]:
    """Random ids, a quarter of each row the prompt."""
    ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0)).tolist()
    cut = max(1, length // 4)
    prompts = [Prompt(str(n), "main", row[:cut], Example("")) for n, row in enumerate(ids)]
    return [
        Rollout(prompt, 0, row[cut:], [0.0] * (length - cut), "", "length", 0)
        for prompt, row in zip(prompts, ids, strict=True)
    ]


def rounding() -> Table:
    """Loss and gradient of the demo student under the demo teacher's hidden states, exact and rounded."""
    student = HFStudent(demo_model("student"))
    tokenizer, model = student.tokenizer(), student.load()
    sampler = HFSampler()
    sampler.attach(model.eval(), tokenizer, student.stop_ids(tokenizer))
    examples = Addition("train", size=256).load()
    prompts = [Prompt(str(n), "main", tokenizer(str(e.prompt))["input_ids"], e) for n, e in enumerate(examples)]
    rollouts = sampler.sample(prompts, SamplingParams(max_tokens=7), seed=0)
    teacher = LocalTeacher(demo_model("teacher"))
    teacher.start()
    exact = [score for score in teacher.score(rollouts) if isinstance(score, FullVocab)]
    table = Table(
        "hidden states on the wire",
        "mean reverse KL, nats",
        "its change",
        "relative error of the gradient",
        title="demo student and teacher",
    )
    right_loss, right = gradient(model, rollouts, exact, teacher)
    for name in ("float32", "bfloat16"):
        rounded = [replace(score, hidden=score.hidden.to(getattr(torch, name))) for score in exact]
        loss, grad = gradient(model, rollouts, rounded, teacher)
        error = ((grad - right).norm() / right.norm()).item()
        table.add_row(name, f"{loss:.6f}", f"{loss - right_loss:+.1e}", f"{error:.1e}")
    return table


def gradient(
    model: torch.nn.Module, rollouts: Sequence[Rollout], scores: Sequence[TeacherScores], teacher: LocalTeacher
) -> tuple[float, torch.Tensor]:
    """The mean reverse KL and its gradient in all weights."""
    term = Term("kl", ReverseKL(), teacher="main")
    rows = [
        Row(r, Reward(None), Credit(None), {"main": s}, frozenset(["kl"]))
        for r, s in zip(rollouts, scores, strict=True)
    ]
    body, head = split_model(model)
    vocabulary = len(head.weight)
    (micro,) = make_batch(rows, [term], 2**40, 0).micro_batches
    hidden = body(input_ids=micro.input_ids, attention_mask=micro.attention_mask, use_cache=False).last_hidden_state
    states = hidden.flatten(0, 1)[micro.tokens.predictor]
    heads = {"main": teacher.head().narrowed(vocabulary)}
    loss, _ = streamed_loss(states, head.narrowed(vocabulary), micro, heads, Objective([term], {"kl": 1.0}, vocabulary))
    grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    return loss.item(), torch.cat([grad.flatten() for grad in grads])


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "hidden": 256,
        "vocabulary": 32768,
        "layers": 2,
        "rows": 64,
        "length": 64,
        "repeats": 3,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--no-servers", action="store_true", help="only the last table")
    asked = parser.parse_args()
    quiet_libraries()
    os.environ.pop("OPD_API_KEY", None)  # the servers listen to this machine alone
    torch.set_num_threads(1)
    console = Console(width=120)
    if not asked.no_servers:
        with tempfile.TemporaryDirectory() as folder:
            random_teacher(Path(folder), asked.hidden, asked.vocabulary, asked.layers)
            rollouts = random_rollouts(asked.rows, asked.length, asked.vocabulary)
            found = costs(Path(folder), rollouts, asked.repeats)
        size = f"H {asked.hidden}, V {asked.vocabulary:,}, {asked.layers} layers"
        title = f"{size}; {asked.rows} rows x {asked.length} tokens"
        table = Table("way", "bytes per token", "scored tokens/s", "CPU ms per 1,000 tokens", title=title)
        table.add_row("bf16 logits (computed)", f"{2 * asked.vocabulary:,}", "", "")
        for each in found:
            table.add_row(
                each.way, f"{each.bytes_per_token:,.0f}", f"{each.tokens_per_second:,.0f}", f"{each.cpu_ms:,.0f}"
            )
        console.print(table)
        hidden, vocabulary = LARGE
        console.print(
            f"an 8B model (H {hidden:,}, V {vocabulary:,}), computed: bf16 hidden states {2 * hidden:,}, "
            f"fp32 {4 * hidden:,}, bf16 logits {2 * vocabulary:,} bytes per token"
        )
    console.print(rounding())


if __name__ == "__main__":
    main()

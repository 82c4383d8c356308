"""Weights as a Hugging Face folder: inside every checkpoint, and as `opd export`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from opd import ranks
from opd.checkpoint import Checkpoints
from opd.students import HFStudent

WEIGHTS, ADAPTER = "hf", "adapter"


def write_weights(
    student: HFStudent, tokenizer: PreTrainedTokenizerBase, weights: Iterator[tuple[str, Tensor]], folder: Path
) -> None:
    """Writes the student as a folder that `from_pretrained` and vLLM load; all ranks call, rank 0 writes."""
    lead = ranks.rank() == 0
    tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in weights if lead}
    if not lead:
        return
    folder.mkdir(parents=True)
    config = AutoConfig.from_pretrained(student.model, trust_remote_code=student.trust_remote_code)
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    config.dtype = next(iter(tensors.values())).dtype
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    try:
        GenerationConfig.from_pretrained(student.model).save_pretrained(folder)
    except OSError:  # the start model has none
        return


def write_adapter(model: PeftModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes the adapter alone; rank 0 writes, inside a context in which its weights are whole."""
    if ranks.rank() == 0:
        model.save_pretrained(str(folder))
        tokenizer.save_pretrained(folder)


def export_run(run_dir: Path, out: Path, which: str = "latest", adapter: bool = False) -> Path:
    """Copies the weights of a run's checkpoint to `out`: a whole model, or its adapter.

    Raises:
        ValueError: no such checkpoint, `out` exists, or an adapter is asked of a run that trained all weights.
    """
    checkpoints = Checkpoints.of_run(run_dir)
    chosen = checkpoints.best() if which == "best" else checkpoints.latest()
    if chosen is None:
        raise ValueError(f"{run_dir}: no {which} checkpoint there; is it the folder of a run (run_dir=...)?")
    if out.exists():
        raise ValueError(f"out: {out} exists already; choose another folder, nothing was overwritten")
    trained_adapter = (chosen / ADAPTER).is_dir()
    if adapter and not trained_adapter:
        raise ValueError(f"adapter=true: {run_dir} trained all weights, there is no adapter")
    source = chosen / (ADAPTER if adapter else WEIGHTS)
    aside = out.with_name(f".writing-{out.name}")
    shutil.rmtree(aside, ignore_errors=True)
    if trained_adapter and not adapter:
        _merge(chosen / ADAPTER, aside)
    else:
        shutil.copytree(source, aside)
    aside.rename(out)
    return out


@torch.no_grad()
def _merge(adapter: Path, out: Path) -> None:
    model = AutoPeftModelForCausalLM.from_pretrained(str(adapter))
    model.merge_and_unload().save_pretrained(out)
    AutoTokenizer.from_pretrained(str(adapter)).save_pretrained(out)

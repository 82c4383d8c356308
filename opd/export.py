"""Weights as a Hugging Face folder: inside every checkpoint, and as `opd export`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from omegaconf import OmegaConf
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from opd import ranks
from opd.checkpoint import Checkpoints
from opd.students import HFStudent
from opd.weight_sync import named_weights

WEIGHTS, ADAPTER = "hf", "adapter"


def write_weights(
    student: HFStudent, tokenizer: PreTrainedTokenizerBase, weights: Iterator[tuple[str, Tensor]], folder: Path
) -> None:
    """Writes the student as a folder that `from_pretrained` and vLLM load; all ranks call, rank 0 writes.

    Raises:
        OSError: the folder could not be written.
    """
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
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)  # as any other file; the library makes it private
    except SafetensorError as error:
        raise OSError(f"{folder}/model.safetensors: {error}") from error
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
        ValueError: no such checkpoint, `out` exists, an adapter is asked of a run that trained all weights, or the
            model that an adapter was trained on cannot be read.
    """
    if which not in ("latest", "best"):
        raise ValueError(f"which={which}: choose latest or best")
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
        _merge(run_dir, chosen / ADAPTER, aside)
    else:
        shutil.copytree(source, aside)
    aside.rename(out)
    return out


def _merge(run_dir: Path, adapter: Path, out: Path) -> None:
    """The adapter in its base, by the same fp32 sum and in the same dtype as the sampler got it."""
    settings = OmegaConf.load(run_dir / "config.yaml").student
    student = HFStudent(settings.model, settings.dtype, trust_remote_code=settings.trust_remote_code)
    try:
        base = student.load()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"student.model={settings.model}: the run trained an adapter on it, and it cannot be read there any more "
            f"({str(error).strip().partition(chr(10))[0]}); put it back, correct student.model in "
            f"{run_dir / 'config.yaml'}, or export the adapter alone by adapter=true"
        ) from error
    model = PeftModel.from_pretrained(base, str(adapter), autocast_adapter_dtype=False)
    weights = named_weights(model, lambda _: nullcontext())
    write_weights(student, AutoTokenizer.from_pretrained(str(adapter)), weights, out)

"""Students: the model that is trained, and the samplers that draw its answers."""

from opd.students.hf_sampler import HFSampler
from opd.students.model import HFStudent
from opd.students.sampler import Sampler, SamplingParams
from opd.students.vllm_sampler import VLLMSampler

__all__ = ["HFSampler", "HFStudent", "Sampler", "SamplingParams", "VLLMSampler"]

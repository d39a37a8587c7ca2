"""What needs a CUDA device. `scripts/gpu` runs these."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from specinfer import LLM, SamplingParams
from specinfer.attention import Span, TorchAttention
from specinfer.sampling.noise import gumbel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_noise_has_the_same_bits() -> None:
    keys = [(0, 0, 0), (2**63, 3, 4097), (12345, 1, 77)]
    assert torch.equal(gumbel(keys, 49152, "cuda").cpu(), gumbel(keys, 49152))


def test_attention_equals_cpu() -> None:
    rng = np.random.default_rng(0)
    shape = (401, 3, 64)
    pools = {d: [torch.zeros(shape, device=d) for _ in range(2)] for d in ("cpu", "cuda")}
    filler = torch.randn(shape)
    filler[400] = 0
    order = rng.permutation(400)
    span = Span(order[:300], order[300:306], np.array([-1, 0, 1, 1, 0, 4]))
    q, k, v = torch.randn(6, 9, 64), torch.randn(6, 3, 64), torch.randn(6, 3, 64)
    outputs = []
    for device, (pool_k, pool_v) in pools.items():
        pool_k.copy_(filler)
        pool_v.copy_(filler)
        backend = TorchAttention([pool_k], [pool_v], num_heads=9, scale=0.125, null_slot=400)
        backend.plan([span])
        outputs.append(backend.run(q.to(device), k.to(device), v.to(device), 0).cpu())
    torch.testing.assert_close(outputs[0], outputs[1], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_changes_nothing(
    tiny_model: Path, tiny_draft: Path, feature_draft: Path, temperature: float
) -> None:
    """cuBLAS promises no bits, but a tiny fp32 model has no near-ties in a few hundred tokens."""
    prompts = [[i, 2, 3, 4] for i in range(8)]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=32) for i in range(8)]
    plain = LLM(str(tiny_model), dtype="float32", device="cuda").generate(prompts, params, progress=False)
    drafts = [str(tiny_draft), str(feature_draft), "ngram"]
    llm = LLM(str(tiny_model), drafts=drafts, dtype="float32", device="cuda")
    for a, b in zip(plain, llm.generate(prompts, params, progress=False), strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
    llm.engine.check_integrity()

"""The built-in target behind the official client: a conversation, streamed, speculating."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specinfer import LLM, SamplingParams
from specinfer.config import EngineConfig
from specinfer.engine.async_engine import AsyncEngine
from specinfer.server.config import ServerConfig

CHAT: Any = [{"role": "user", "content": "Name three colours."}]


def test_a_chat(smollm2_path: Path, running: Any) -> None:
    limits: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 128}
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=16)
    expected = LLM("smollm2-135m", **limits).chat(CHAT, params)[0].outputs[0]
    engine = AsyncEngine.build(
        EngineConfig(model="smollm2-135m", drafts=("default", "ngram"), **limits), max_queue=1
    )
    with (
        running(engine, ServerConfig(model_name="smollm2-135m", port=0)) as server,
        server.client() as client,
    ):
        stream = client.chat.completions.create(
            model="smollm2-135m", messages=CHAT, temperature=0.8, seed=7, max_tokens=16, stream=True,
            extra_body={"speculation": {"statistics": True}},
        )  # fmt: skip
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert chunks[-1].metrics["speculative_decoding"]["num_draft_tokens"] > 0  # type: ignore[attr-defined]

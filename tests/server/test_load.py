"""Many requests at once: every answer is that of the same request alone, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specinfer import LLM, SamplingParams
from specinfer.config import EngineConfig
from specinfer.engine.async_engine import AsyncEngine, Generation
from specinfer.outputs import CompletionOutput, StreamChunk
from specinfer.service import Service

NUM_REQUESTS = 64
NUM_ABORTED = 13  # a fifth
NUM_ROUNDS = 3
BYTES_PER_SLOT = 512  # of the tiny model and its draft in fp32
MAX_TOKENS = 40
DEADLINE = 300.0


def requests() -> list[tuple[list[int], SamplingParams, Service]]:
    """Mixed prompts, of which some begin alike, parameters and services."""
    random = np.random.default_rng(3)
    shared = random.integers(0, 256, 30).tolist()
    made = []
    for i in range(NUM_REQUESTS):
        own = random.integers(0, 256, int(random.integers(1, 40))).tolist()
        params = SamplingParams(
            seed=i,
            temperature=float(random.choice([0.0, 0.7, 1.3])),
            top_k=int(random.choice([0, 5])),
            top_p=float(random.choice([0.8, 1.0])),
            max_tokens=int(random.integers(1, MAX_TOKENS)),
            stop=("a", "<w270>") if i % 5 == 0 else (),
            n=1 + i % 2,
        )
        service = Service(
            priority=int(random.integers(-1, 2)),
            ttft=float(random.choice([0.01, 5.0])) if i % 3 == 0 else None,
            tpot=0.001 if i % 4 == 0 else None,
            speculation=i % 7 != 0,
        )
        made.append(([*shared, *own] if i % 2 else own, params, service))
    return made


def resident_bytes() -> int:
    """Memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def outputs(generation: Generation) -> list[CompletionOutput]:
    found = {index: chunk.output async for index, chunk in generation if chunk.output is not None}
    return [found[index] for index in sorted(found)]


async def run_round(engine: AsyncEngine, seed: int) -> dict[int, list[CompletionOutput]]:
    """Everything at once, a fifth of it aborted after a random number of chunks."""
    random = np.random.default_rng(seed)
    aborted = set(random.permutation(NUM_REQUESTS)[:NUM_ABORTED].tolist())
    finished: dict[int, list[CompletionOutput]] = {}

    async def one(i: int, yields: int, num_chunks: int) -> None:
        prompt, params, service = requests_made[i]
        for _ in range(yields):  # arrivals spread over the running steps
            await asyncio.sleep(0)
        generation = await engine.generate([prompt], params, service)
        if i not in aborted:
            finished[i] = await outputs(generation)
            return
        async for _ in generation:
            num_chunks -= 1
            if num_chunks < 0:
                break
        engine.abort(generation)

    requests_made = requests()
    await asyncio.gather(*(
        one(i, int(random.integers(0, 200)), int(random.integers(0, 8))) for i in range(NUM_REQUESTS)
    ))  # fmt: skip
    await engine.wait_until_idle()
    engine.check_integrity()
    return finished


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> list[list[CompletionOutput]]:
    """The same requests without drafts, one after the other, in an empty engine."""
    llm = LLM(str(tiny_model), dtype="float32", prefix_cache=False)
    return [list(llm.generate(prompt, params)[0].outputs) for prompt, params, _ in requests()]


def test_answers_under_load_are_those_alone(
    tiny_model: Path, tiny_draft: Path, alone: list[list[CompletionOutput]]
) -> None:
    num_tokens = sum((len(p) + params.max_tokens) * params.n for p, params, _ in requests())
    config = EngineConfig(
        model=str(tiny_model),
        drafts=(str(tiny_draft),),
        dtype="float32",
        tree="2,1",
        max_num_seqs=24,
        max_step_tokens=64,
        kv_memory=num_tokens // 4 * BYTES_PER_SLOT,
    )

    async def main() -> None:
        async with AsyncEngine.build(config, max_queue=200) as engine:
            resident = []
            for round_number in range(NUM_ROUNDS):
                finished = await run_round(engine, round_number)
                assert len(finished) == NUM_REQUESTS - NUM_ABORTED
                for i, made in finished.items():
                    assert [(o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in made] == [
                        (o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in alone[i]
                    ], i
                assert engine.gauges()["cache_usage"] == 0
                assert engine.num_open == 0 and not engine._subscriptions
                gc.collect()
                resident.append(resident_bytes())
            assert resident[-1] - resident[0] < 20 * 2**20

    asyncio.run(asyncio.wait_for(main(), DEADLINE))


def test_a_backlog_lets_others_in() -> None:
    """Or one stream whose chunks come faster than they are sent keeps the loop, its own timeout included."""

    async def main() -> int:
        generation = Generation([])
        for _ in range(9):
            generation.deliver(0, StreamChunk(text="a", token_ids=(1,)))
        other = asyncio.create_task(asyncio.sleep(0))
        async for _ in generation:
            if other.done():
                break
        return len(generation._chunks)

    assert asyncio.run(main()) > 0


def test_a_client_sees_what_the_engine_made(server: Any, alone: list[list[CompletionOutput]]) -> None:
    import openai

    async def main() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            calls = []
            for prompt, params, service in requests()[::2]:
                extra = {"top_k": params.top_k, "priority": service.priority}
                calls.append(client.completions.create(
                    model="tiny", prompt=prompt, seed=params.seed, temperature=params.temperature,
                    top_p=params.top_p, max_tokens=params.max_tokens, stop=list(params.stop) or None,
                    n=params.n, extra_body=extra,
                ))  # fmt: skip
            return await asyncio.gather(*calls)

    for answer, expected in zip(asyncio.run(asyncio.wait_for(main(), DEADLINE)), alone[::2], strict=True):
        assert [c.text for c in answer.choices] == [o.text for o in expected]
        assert [c.finish_reason for c in answer.choices] == [o.finish_reason for o in expected]

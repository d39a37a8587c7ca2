"""LLM: the offline interface, in the shapes people know from vLLM."""

from __future__ import annotations

import operator
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Never

from specinfer.config import DEFAULT_TREE, DType, EngineConfig, Quantize
from specinfer.engine.build import build_engine
from specinfer.engine.chunk import Cursor
from specinfer.engine.request import Request
from specinfer.errors import RequestError
from specinfer.interrupt import catch_interrupt
from specinfer.models.tokenizer import Tokenizer
from specinfer.outputs import RequestOutput, StreamChunk
from specinfer.sampling_params import SamplingParams
from specinfer.tree import Topology

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, str]]


class LLM:
    """A target model with its drafts, ready to generate.

        llm = LLM("smollm2-135m", drafts=["default"])
        llm.generate("The sea is", SamplingParams(temperature=0))[0].outputs[0].text

    See EngineConfig for the settings. With the coupled verifier the tokens are the same with and without
    drafts. Raises ConfigError, ModelError or DownloadError.
    """

    def __init__(
        self,
        model: str,
        *,
        drafts: Sequence[str] = (),
        tree: str | Topology = DEFAULT_TREE,
        verifier: str = "coupled",
        dtype: DType = "auto",
        quantize: Quantize | None = None,
        device: str = "auto",
        max_num_seqs: int = 16,
        max_model_len: int | None = None,
        max_step_tokens: int = 256,
        kv_memory: int | None = None,
        prefix_cache: bool = True,
        **unknown: Never,
    ) -> None:
        names = (drafts,) if isinstance(drafts, str) else tuple(drafts)
        config = EngineConfig(
            model=str(model), drafts=names, tree=tree, verifier=verifier, dtype=dtype, quantize=quantize,
            device=device, max_num_seqs=max_num_seqs, max_model_len=max_model_len,
            max_step_tokens=max_step_tokens, kv_memory=kv_memory, prefix_cache=prefix_cache, **unknown,
        )  # fmt: skip
        self.engine = build_engine(config)

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer. Raises RequestError where the checkpoint has none."""
        if self.engine.tokenizer is None:
            raise RequestError("the model has no tokenizer", hint="give prompts as token ids")
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """One RequestOutput per prompt, in order. progress: a bar on stderr, if that is a terminal.

        Raises RequestError before any work is done when one of the prompts cannot be served; when the call is
        interrupted, its requests are aborted and their slots freed.
        """
        many = as_prompts(prompts)
        params = sampling_params if sampling_params is not None else SamplingParams()
        each = [params] * len(many) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise RequestError(f"{len(many)} prompts, but {len(each)} sampling params")
        ids = [self._ids(prompt) for prompt in many]
        for one, p in zip(ids, each, strict=True):
            self.engine.check(one, p)
        groups: list[list[Request]] = []
        try:
            for one, p in zip(ids, each, strict=True):
                groups.append(self.engine.add_request(one, p))
            self._run([r for group in groups for r in group], progress)
        finally:
            for request in (r for group in groups for r in group):
                self.engine.abort(request)
        return [
            RequestOutput(
                request_id=group[0].request_id,
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=tuple(group[0].tokens[: group[0].num_prompt_tokens]),
                outputs=[request.completion() for request in group],
                prompt_logprobs=group[0].prompt_scores(),
            )
            for prompt, group in zip(many, groups, strict=True)
        ]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role": ..., "content": ...}."""
        several = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [self.tokenizer.apply_chat_template(as_messages(one)) for one in several]
        return self.generate(prompts, sampling_params, progress=progress)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[StreamChunk]:
        """Chunks of one sample as its steps emit them. Closing the iterator aborts the request.

        Raises RequestError at once; the request itself starts with the first chunk that is asked for.
        """
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise RequestError("n must be 1 in a stream")
        ids = self._ids(prompt)
        self.engine.check(ids, params)
        return self._chunks(ids, params)

    def _chunks(self, ids: Sequence[int], params: SamplingParams) -> Generator[StreamChunk]:
        request = self.engine.add_request(ids, params)[0]
        cursor = Cursor()
        try:
            # By the request's state: other calls may step the engine between two chunks.
            while True:
                if cursor.is_behind(request):
                    yield cursor.chunk(request)
                elif request.finish_reason is not None:
                    return
                else:
                    with catch_interrupt() as interrupt:
                        self.engine.step()
                    interrupt.raise_if_set()
        finally:
            self.engine.abort(request)

    def _run(self, requests: Sequence[Request], progress: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        shown = progress and len(requests) > 1 and sys.stderr.isatty()
        with (
            Progress(console=console, disable=not shown, transient=True) as bar,
            catch_interrupt() as interrupt,
        ):
            task = bar.add_task("generating", total=len(requests))
            pending = set(requests)
            while pending:
                interrupt.raise_if_set()
                self.engine.step()
                done = {r for r in pending if r.finish_reason is not None}
                pending -= done
                if done:
                    bar.advance(task, len(done))
        interrupt.raise_if_set()

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return as_token_ids(prompt)
        if not prompt:
            raise RequestError("the prompt is empty", hint="give at least one character")
        return self.tokenizer.encode(prompt)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single text or list of token ids is a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and all(isinstance(p, Integral) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def as_token_ids(prompt: Sequence[int]) -> list[int]:
    """Plain ints of whatever integers a prompt is made of. Raises RequestError."""
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise RequestError(
            f"a prompt is a text or a list of token ids, got {prompt!r:.80}", hint="give a str or ints"
        ) from None


def as_messages(conversation: Iterable[Any]) -> list[dict[str, str]]:
    """Messages as plain dicts; what is none is left for the tokenizer to refuse."""
    return [dict(m) if isinstance(m, Mapping) else m for m in conversation]

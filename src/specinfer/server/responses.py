"""Response bodies."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "abort", "tool_calls"]


class Error(BaseModel):
    """OpenAI's error: what, which class, which field, which case."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every failed request returns."""

    error: Error


class CachedTokens(BaseModel):
    """Prompt tokens that the prefix cache held."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class SpeculationStats(BaseModel):
    """Speculation of a whole request: target steps, those with a tree, the trees' tokens, accepted ones, and
    both by depth."""

    num_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_pos: list[int]
    drafted_per_pos: list[int]


class Metrics(BaseModel):
    """Where the request asked for it."""

    speculative_decoding: SpeculationStats


class Response(BaseModel):
    """What all generations share."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None = None


class CompletionLogprobs(BaseModel):
    """[tokens] each; text_offset: where a token begins in the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


class CompletionChoice(BaseModel):
    """prompt_logprobs: [prompt tokens], by token id, in the first choice of a prompt, where asked for."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class Completion(Response):
    """A completion, or a chunk of one."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: Metrics | None = None


class CalledFunction(BaseModel):
    """arguments: JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolCallDelta(ToolCall):
    """index: among the calls of its answer."""

    index: int


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token that came, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """[tokens of the answer, or of this part of it]"""

    content: list[TokenLogprob]
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: ChatLogprobs | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class ChatCompletion(Response):
    """A whole answer."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    metrics: Metrics | None = None


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: ChatLogprobs | None = None


class ChatChunk(Response):
    """A part of an answer."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: Metrics | None = None


class Model(BaseModel):
    """The model that is served. max_model_len: most tokens of prompt and output together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["specinfer"] = "specinfer"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(BaseModel):
    prompt: str


class Health(BaseModel):
    status: Literal["ok", "draining"]


class Version(BaseModel):
    version: str

"""Request bodies."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from specinfer.errors import RequestError
from specinfer.sampling_params import SamplingParams
from specinfer.server.fields import Body, SamplingFields

MAX_PROMPTS = 1024
TokenIds = list[int]


class StreamOptions(Body):
    """include_usage: a last chunk with the usage of the whole request. continuous_usage_stats: vLLM's, which
    load generators count tokens by: the chunks before it have the usage so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class ResponseFormat(Body):
    """json_schema: as OpenAI has it, the schema itself under "schema"."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, JsonValue] | None = None

    def form(self) -> dict[str, JsonValue] | None:
        """As `structured_outputs`; None for plain text. Raises RequestError."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"json_object": True}
        schema = (self.json_schema or {}).get("schema")
        if not isinstance(schema, dict):
            raise RequestError('response_format json_schema needs a {"schema": {...}} under json_schema')
        return {"json": schema}


class GenerationBody(SamplingFields):
    """What completions and chats have in common. The last fields are OpenAI's for its own service: they are
    accepted, and change nothing here."""

    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    def check(self) -> None:
        """Raise RequestError for fields that don't go together, or can't be met yet."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options goes with stream: true")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs is not supported in a stream", hint="leave one of them out")

    def sampling_params(self, *, forced: dict[str, JsonValue] | None = None, **others: Any) -> SamplingParams:
        """forced: the form that tool_choice asks for, as `structured_outputs`."""
        form = None if self.response_format is None else self.response_format.form()
        forms = {
            "response_format": form,
            "structured_outputs": self.structured_outputs,
            "tool_choice": forced,
        }
        wanted = [name for name, value in forms.items() if value is not None]
        if len(wanted) > 1:
            raise RequestError(f"{' and '.join(wanted)} exclude each other")
        return super().sampling_params(structured_outputs=forms[wanted[0]] if wanted else None, **others)

    def schemas(self) -> dict[str, dict[str, JsonValue]]:
        """The JSON schemas that the answer must meet, but for structured_outputs': by where they stand."""
        form = None if self.response_format is None else self.response_format.form()
        schema = (form or {}).get("json")
        return {"response_format.json_schema.schema": schema} if isinstance(schema, dict) else {}

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_running_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError("best_of other than n is not supported", hint="leave it out")
        if self.suffix:
            raise RequestError("suffix is not supported", hint="leave it out")
        if self.stream and self.echo and self.logprobs is not None:
            raise RequestError(
                "logprobs with echo is not supported in a stream", hint="leave one of them out"
            )

    def prompts(self) -> list[str | TokenIds]:
        """One entry per prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(Body):
    """A part of a message. Only text: there is no other modality."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def check_is_text(cls, part: Any) -> Any:
        """Say so of images and the like, of which all fields are wrong."""
        if isinstance(part, dict) and part.get("type", "text") != "text":
            raise PydanticCustomError("unsupported", "a part of a message can only be text")
        return part


class ToolFunction(Body):
    """A function the model may call; parameters: its JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool the model may call."""

    type: Literal["function"]
    function: ToolFunction


class CalledFunction(Body):
    """arguments: JSON text. The last field is what the official client's helpers add to a call of ours."""

    name: str
    arguments: str
    parsed_arguments: JsonValue = None


class ToolCall(Body):
    """A call that the assistant made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """With the arguments as an object: templates write the JSON themselves. Raises RequestError."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise RequestError("messages: the arguments of a tool call must be JSON text of an object")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class ChosenFunction(Body):
    name: str


class ChosenTool(Body):
    """The one tool to call."""

    type: Literal["function"]
    function: ChosenFunction


class Message(Body):
    """One turn of a conversation. The last fields are what the official client adds to an answer of ours;
    they change nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    parsed: JsonValue = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it."""
        if isinstance(self.content, list):
            text: str | None = "".join(part.text for part in self.content)
        else:
            text = self.content
        if text is None and not self.tool_calls:
            raise RequestError("a message has neither content nor tool_calls")
        made: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": text or "",
        }
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                made[name] = getattr(self, name)
        if self.tool_calls:
            made["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return made


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs goes with logprobs: true")
        self.forced_functions()

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token; None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the template is to show the model."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    @property
    def wants_one_call(self) -> bool:
        """Whether an answer may hold one call at most."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, ChosenTool)

    def schemas(self) -> dict[str, dict[str, JsonValue]]:
        of_tools = {
            f"tools[{place}].function.parameters": function["parameters"]
            for place, function in self.forced_functions().items()
            if "parameters" in function
        }
        return {**super().schemas(), **of_tools}

    def forced_functions(self) -> dict[int, dict[str, Any]]:
        """Those of which one must be called, by their place in `tools`; none where the model may choose.
        Raises RequestError."""
        if self.tool_choice in (None, "none", "auto"):
            return {}
        functions = {place: tool["function"] for place, tool in enumerate(self.offered_tools())}
        if isinstance(self.tool_choice, ChosenTool):
            name = self.tool_choice.function.name
            functions = {place: f for place, f in functions.items() if f["name"] == name}
        if not functions:
            raise RequestError("tool_choice asks for a function that is not among tools")
        return functions


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation as the model would see it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True

    def check(self) -> None:
        """Raise RequestError unless there is one thing to tokenise."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give prompt or messages")


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds

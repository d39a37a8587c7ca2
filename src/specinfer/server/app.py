"""The HTTP app."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from specinfer.engine.async_engine import AsyncEngine
from specinfer.server.chat import chat_router
from specinfer.server.completions import completions_router, token_ids
from specinfer.server.config import ServerConfig
from specinfer.server.errors import ApiError, add_error_handlers
from specinfer.server.guard import Guard
from specinfer.server.prometheus import Exposition
from specinfer.server.responses import Detokenized, ErrorBody, Health, Model, ModelList, Tokenized, Version
from specinfer.server.schema import DetokenizeBody, TokenizeBody
from specinfer.server.serving import VERSION, Serving

FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 422, 429, 500, 503)
}


def make_app(engine: AsyncEngine, config: ServerConfig) -> FastAPI:
    """OpenAI's interface to one engine. Its OpenAPI description is at /openapi.json, for people at /docs."""
    app = FastAPI(title="specinfer", version=VERSION, responses=FAILURES)
    serving = Serving(engine, config)
    app.include_router(completions_router(serving))
    app.include_router(chat_router(serving))
    app.include_router(model_router(serving))
    app.include_router(status_router(serving))
    add_error_handlers(app)
    app.add_middleware(Guard, config=config)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return app


def model_router(serving: Serving) -> APIRouter:
    """The model, and its tokens."""
    router = APIRouter()
    limit = serving.engine.max_total_tokens
    model = Model(id=serving.config.model_name, created=serving.created, max_model_len=limit)

    @router.get("/v1/models", tags=["OpenAI"])
    async def list_models() -> ModelList:
        """The one model that is served."""
        return ModelList(data=[model])

    @router.get("/v1/models/{name:path}", tags=["OpenAI"])
    async def retrieve_model(name: str) -> Model:
        """The model by its name."""
        serving.check_model(name)
        return model

    @router.post("/tokenize", tags=["tokens"])
    async def tokenize(body: TokenizeBody) -> Tokenized:
        """Token ids of a text, or of a conversation as the model would see it."""
        serving.check_model(body.model)
        body.check()
        if body.messages is not None:
            messages = [message.for_template() for message in body.messages]
            tokens = await serving.engine.in_worker(serving.engine.tokenizer.apply_chat_template, messages)
        elif body.add_special_tokens:
            tokens = await token_ids(serving, body.prompt or "")
        else:
            tokens = await serving.engine.in_worker(serving.engine.tokenizer.encode, body.prompt, False)
        return Tokenized(count=len(tokens), max_model_len=limit, tokens=tokens)

    @router.post("/detokenize", tags=["tokens"])
    async def detokenize(body: DetokenizeBody) -> Detokenized:
        """The text of token ids, special tokens included."""
        serving.check_model(body.model)
        return Detokenized(prompt=await serving.engine.in_worker(serving.decode, body.tokens))

    return router


def status_router(serving: Serving) -> APIRouter:
    """How the server is."""
    router = APIRouter(tags=["status"])
    exposition = Exposition(serving.engine, serving.config.model_name)

    @router.get("/health")
    async def health() -> Health:
        """Whether the server lives; one that answers 503 should be started again."""
        if serving.engine.failure is not None:
            raise ApiError(503, f"the engine has stopped: {serving.engine.failure}", code="engine_stopped")
        return Health(status="draining" if serving.engine.is_draining else "ok")

    @router.get("/ready")
    async def ready() -> Health:
        """Whether new requests are taken."""
        if serving.engine.is_draining:
            raise ApiError(503, "the server is shutting down", code="draining")
        return await health()

    @router.get("/version")
    async def version() -> Version:
        """The version of specinfer."""
        return Version(version=VERSION)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(exposition.text(), media_type=CONTENT_TYPE_LATEST)

    return router

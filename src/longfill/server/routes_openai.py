"""The OpenAI endpoints' routes: completions, chats, models, and the tokenizer.

May import FastAPI and the OpenAI endpoints. Invariant: a route reads the raw body itself and lets threads do the rest,
so that no body, however large, stops the event loop.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from longfill.server.errors import ApiError
from longfill.server.openai_call import answer
from longfill.server.openai_docs import GENERATION_ERRORS, answers, body_of
from longfill.server.openai_model import ServedModel
from longfill.server.openai_serving import OpenAIServing
from longfill.server.prompts import read_body, read_ids, read_text
from longfill.server.protocol import Body, validate
from longfill.server.protocol_chat import ChatCompletionRequest
from longfill.server.protocol_completion import (
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChat,
    TokenizePrompt,
    tokenize_model,
)
from longfill.server.protocol_responses import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Detokenized,
    ModelCard,
    ModelList,
    Tokenized,
    encode,
)
from longfill.server.state import AppState

_SHORT_ERRORS = (400, 401, 404, 408, 413, 500)


def openai_router(state: AppState) -> APIRouter:
    """Routes over one server's state. Raises LongfillError for a template or parser that cannot work."""
    serving = OpenAIServing(state)
    router = APIRouter()

    @router.post(
        "/v1/completions",
        summary="Continue prompts",
        response_class=Response,
        openapi_extra=body_of(CompletionRequest),
        responses=answers(Completion, frame=Completion, errors=GENERATION_ERRORS),
    )
    async def completions(request: Request) -> Response:
        return await answer(request, serving.completions, serving)

    @router.post(
        "/v1/chat/completions",
        summary="Answer a conversation",
        response_class=Response,
        openapi_extra=body_of(ChatCompletionRequest),
        responses=answers(ChatCompletion, frame=ChatChunk, errors=GENERATION_ERRORS),
    )
    async def chat_completions(request: Request) -> Response:
        return await answer(request, serving.chat, serving)

    @router.get("/v1/models", summary="What is served", response_class=Response, responses=answers(ModelList))
    async def models() -> Response:
        return _json(encode(serving.model.cards()))

    @router.get(
        "/v1/models/{model:path}",
        summary="One of the names",
        response_class=Response,
        responses=answers(ModelCard, errors=(400, 401, 404, 500)),
    )
    async def model(model: str) -> Response:
        serving.model.check_name(model)
        return _json(encode(next(card for card in serving.model.cards().data if card.id == model)))

    @router.post(
        "/tokenize",
        summary="Token ids of a text or a conversation",
        response_class=Response,
        openapi_extra=body_of(TokenizePrompt, TokenizeChat),
        responses=answers(Tokenized, errors=_SHORT_ERRORS),
    )
    async def tokenize(request: Request) -> Response:
        body = await _body(request)
        return _json(await serving.lanes.run(len(body), _tokenized, serving.model, body))

    @router.post(
        "/detokenize",
        summary="Text of token ids",
        response_class=Response,
        openapi_extra=body_of(DetokenizeRequest),
        responses=answers(Detokenized, errors=_SHORT_ERRORS),
    )
    async def detokenize(request: Request) -> Response:
        body = await _body(request)
        return _json(await serving.lanes.run(len(body), _detokenized, serving.model, body))

    return router


async def _body(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect:
        raise ApiError(499, "the client went away", code="client_closed_request") from None


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _tokenized(model: ServedModel, body: bytes) -> bytes:
    fields = read_body(body)
    if "prompt" in fields:
        fields["prompt"] = read_text(fields["prompt"], "prompt")
    kind: type[Body] = tokenize_model(fields)
    request: Any = validate(kind, fields)
    model.check_name(request.model)
    if isinstance(request, TokenizePrompt):
        wraps = request.add_special_tokens is not False
        tokenizer = model.prompter.need_tokenizer("prompt")
        ids = tokenizer.encode(request.prompt, add_special_tokens=wraps).tolist()
    else:
        ids = model.prompter.chat(request, {}).token_ids.tolist()
    strings = [model.speller.string_of(token) for token in ids] if request.return_token_strs else None
    return encode(Tokenized(len(ids), model.max_model_len, ids, strings))


def _detokenized(model: ServedModel, body: bytes) -> bytes:
    fields = read_body(body)
    if "tokens" in fields:
        fields["tokens"] = read_ids(fields["tokens"], model.vocab_size, "tokens")
    request = validate(DetokenizeRequest, fields)
    model.check_name(request.model)
    tokenizer = model.prompter.need_tokenizer("tokens")
    return encode(Detokenized(tokenizer.decode(request.tokens, skip_special_tokens=False)))

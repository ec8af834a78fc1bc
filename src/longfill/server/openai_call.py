"""One request to a completion endpoint, from its body to its last byte: read, admit, compute, answer.

May import the client, the endpoints and the answers. Invariant: whatever ends a request (an answer, an error, its
deadline, a client that went away), its prompts are aborted in the engine unless they have ended, and a client that is
still there gets an answer with a code.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from longfill.request import SamplingParams
from longfill.server.cache_report import CachedPrompt, PrefixCacheReport
from longfill.server.errors import ApiError, as_api_error, deadline_exceeded
from longfill.server.messages import AddRequest, OutputDelta
from longfill.server.openai_answer import Answer, AnswerHead, PromptState
from longfill.server.openai_endpoints import Endpoint, Parsed, Prepared
from longfill.server.openai_prefill import PROGRESS_INTERVAL, ProgressFrames
from longfill.server.openai_serving import OpenAIServing
from longfill.server.openai_sse import DONE, ClientGoneError, ClientWatch, FrameSender, SseResponse, cancelled, data
from longfill.server.protocol import GenerationBody
from longfill.server.protocol_responses import encode
from longfill.server.streams import RequestStream

HEADERS_WITHIN = 0.7
"""Seconds from the end of the body in which an error still gets a status; then a stream's headers go out."""
_LARGE_BODY = 16 * 2**20
"""Bytes beyond which reading a body takes the lane of long work: as many small messages it may take a second."""
_LARGE_ANSWER = 4096
"""What shows more tokens of a prompt than this is written in a thread."""


async def answer(request: Request, endpoint: Endpoint, serving: OpenAIServing) -> Response:
    """Serve one request. Raises ApiError where it failed before its answer began."""
    try:
        body = await request.body()
    except ClientDisconnect:
        return Response(status_code=499)
    headers_until = time.monotonic() + HEADERS_WITHIN
    call = Call(request, endpoint, serving)
    watch = ClientWatch(request)
    handed_over = False
    try:
        await watch.guard(call.read(body))
        if not call.body.stream:
            return await watch.guard(call.whole())
        begin = asyncio.ensure_future(call.begin())
        with contextlib.suppress(TimeoutError):
            await watch.guard(begin, max(headers_until - time.monotonic(), 0))
        handed_over = True
        return SseResponse(lambda sender: call.stream(sender, begin), watch, call.close, serving.sse_keepalive_interval)
    except ClientGoneError:
        return Response(status_code=499)
    finally:
        if not handed_over:
            watch.close()
            await call.close()


class Call:
    """The state of one request."""

    def __init__(self, request: Request, endpoint: Endpoint, serving: OpenAIServing) -> None:
        self.arrival: float = request.state.arrival
        self.body: GenerationBody
        self._request = request
        self._endpoint = endpoint
        self._serving = serving
        self._parsed: Parsed
        self._answer: Answer
        self._size = 0
        self._timeout: float | None = serving.request_timeout
        self._streams: list[RequestStream] = []
        self._pending: dict[asyncio.Task[OutputDelta], int] = {}
        self._entered = ExitStack()
        self._first: tuple[int, OutputDelta] | None = None
        self._reports: dict[int, asyncio.Task[PrefixCacheReport]] = {}
        self._waiting = 0
        """Prompts without a first token."""

    async def read(self, body: bytes) -> None:
        """Check the body."""
        self._size = len(body)
        async with self._in_time():
            # Reading is short work even for a prompt of a million tokens, and says whether headers are wanted soon.
            size = self._size if self._size > _LARGE_BODY else 0
            self._parsed = await self._serving.lanes.run(size, self._endpoint.read, body)
        self.body = self._parsed.body
        if self.body.timeout is not None:
            self._timeout = min(self.body.timeout, self._timeout or self.body.timeout)
        if self.body.request_id is not None and "x-request-id" not in self._request.headers:
            self._request.state.request_id = self._request.state.ticket.request_id = self.body.request_id
        self._request.state.ticket.stream = bool(self.body.stream)

    async def begin(self) -> None:
        """Tokenise, be admitted, go to the engine and wait for the first delta."""
        async with self._in_time():
            prepared = await self._serving.lanes.run(self._size, self._parsed.prepare)
            if self._request.state.ticket.aborted:
                raise ApiError(503, "the request was aborted by the server's operator", code="aborted")
            self._request.state.ticket.queued(sum(prompt.token_ids.size for prompt, _ in prepared.prompts))
            self._add(prepared)
            self._first = await self._next()

    def _add(self, prepared: Prepared) -> None:
        state = self._request.state
        states = [PromptState(prompt, params) for prompt, params in prepared.prompts]
        for index, (prompt, params) in enumerate(prepared.prompts):
            name = state.request_id if len(states) == 1 else f"{state.request_id}-{index}"
            # A proxy that tries again keeps the id, while the first try may still be on its way out of the engine.
            name = self._serving.client.free_id(name)
            stream = self._serving.client.add(self._message(name, params), prompt.token_ids)
            self._streams.append(self._entered.enter_context(stream))
            state.ticket.streams.append(stream)
            self._wait_for(index)
        self._waiting = len(states)
        self._answer = prepared.answer(
            AnswerHead(
                id=f"{self._endpoint.id_prefix}{state.request_id}",
                model=self.body.model or self._serving.model.name,
                created=int(time.time()),
                body=self.body,
                prompts=states,
                speller=self._serving.model.speller,
            )
        )

    def _message(self, name: str, params: SamplingParams) -> AddRequest:
        state = self._request.state
        return AddRequest(
            request_id=name,
            params=params,
            cache_salt=self._cache_salt,
            priority=self.body.priority or 0,
            tenant=state.tenant,
            kv_transfer_params=self.body.kv_transfer_params,
        )

    @property
    def _cache_salt(self) -> str:
        own: str | None = self._request.state.cache_salt
        return own if own is not None else self.body.cache_salt or ""

    async def whole(self) -> Response:
        """Compute all of it and answer."""
        await self.begin()
        async with self._in_time():
            async for index, delta in self._deltas():
                await self._take(index, delta)
            await self._explain()
            content = await self._written(self._encoded)
        return Response(content, media_type="application/json")

    def _encoded(self) -> bytes:
        return encode(self._answer.whole())

    async def _written(self, write: Callable[[], bytes]) -> bytes:
        """What `write` returns, from a thread where it shows many tokens of a prompt."""
        body = self.body
        shows = body.prompt_logprobs is not None or body.return_token_ids or getattr(body, "echo", None)
        longest = max(stream.num_prompt_tokens for stream in self._streams)
        return await self._serving.lanes.run(self._size, write) if shows and longest > _LARGE_ANSWER else write()

    async def stream(self, sender: FrameSender, begin: asyncio.Future[None]) -> None:
        """Send all frames, the last of which is [DONE] whatever happens."""
        shows = self.body.stream_options is not None and self.body.stream_options.prefill_progress
        progress = ProgressFrames(self._streams) if shows else None
        try:
            reporter = asyncio.create_task(self._report_progress(sender, progress)) if progress else None
            try:
                await begin
                async with self._in_time():
                    await self._stream_deltas(sender, progress, reporter)
            finally:
                await asyncio.gather(*(cancelled(task) for task in (begin, reporter) if task is not None))
        except Exception as error:
            await self.close()  # before the client is told, who may not be reading
            await sender.send(data(as_api_error(error).body))
        await sender.send(DONE)

    async def _stream_deltas(
        self, sender: FrameSender, progress: ProgressFrames | None, reporter: asyncio.Task[None] | None
    ) -> None:
        async for index, delta in self._deltas():
            frames = await self._take(index, delta)
            if progress is not None and reporter is not None and self._waiting == 0:
                await cancelled(reporter)
                frames = data(encode(self._answer.progress(progress.last()))) + frames
                progress = None
            if frames:
                await sender.send(frames)
        if self._answer.head.includes_usage or self.body.kv_transfer_params is not None:
            await self._explain()
            await sender.send(data(encode(self._answer.last())))

    async def _report_progress(self, sender: FrameSender, progress: ProgressFrames) -> None:
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL)
            news = progress.news()
            if news is not None:
                await sender.send(data(encode(self._answer.progress(news))))

    async def _deltas(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        """All deltas of all prompts, as they come."""
        if self._first is not None:
            yield self._first
        while (item := await self._next()) is not None:
            yield item

    async def _next(self) -> tuple[int, OutputDelta] | None:
        """A delta and the number of its prompt; None when all prompts have ended."""
        if not self._pending:
            return None
        # To wait is work for each of them: only where none is done, so that thousands of prompts stay cheap.
        if not any(task.done() for task in self._pending):
            await asyncio.wait(self._pending, return_when=asyncio.FIRST_COMPLETED)
        task = next(task for task in self._pending if task.done())
        index = self._pending.pop(task)
        delta = task.result()
        if not delta.finished:
            self._wait_for(index)
        return index, delta

    def _wait_for(self, index: int) -> None:
        self._pending[asyncio.ensure_future(self._streams[index].next())] = index

    async def _take(self, index: int, delta: OutputDelta) -> bytes:
        """Add a delta to the answer; returns the frames that show it, if this is a stream."""
        state = self._answer.head.prompts[index]
        waited = not state.started

        def write() -> bytes:
            frames = self._answer.take(index, delta)
            return b"".join(data(encode(frame)) for frame in frames) if self.body.stream else b""

        frames = await self._written(write) if waited else write()
        if waited and state.started:
            self._waiting -= 1
            self._reports[index] = asyncio.create_task(self._report(index, state))
            if self._waiting == 0:
                self._request.state.ticket.started()
        return frames

    async def _report(self, index: int, state: PromptState) -> PrefixCacheReport:
        prompt = CachedPrompt(
            request_id=self._streams[index].request_id,
            tenant=self._request.state.tenant,
            salt=self._cache_salt,
            token_ids=state.prompt.token_ids,
            num_cached_tokens=state.cached_tokens,
            prompt_logprobs=state.params.prompt_logprobs is not None,
        )
        return await self._serving.lanes.run(prompt.token_ids.size, self._serving.reports.explain, prompt)

    async def _explain(self) -> None:
        if self.body.explain_prefix_cache and self._reports:
            self._answer.head.prefix_cache = await self._reports[0]

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Raises ApiError where what happens inside goes beyond the request's deadline."""
        if self._timeout is None:
            yield
            return
        try:
            async with asyncio.timeout(max(self.arrival + self._timeout - time.monotonic(), 0)):
                yield
        except TimeoutError:
            raise deadline_exceeded(self._timeout) from None

    async def close(self) -> None:
        """Abort what has not ended. Called at the end, and before it where there was an error."""
        for task in self._pending:
            await cancelled(task)
        self._entered.close()

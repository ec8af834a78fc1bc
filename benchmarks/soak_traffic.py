"""Mixed traffic for the soak: what users send, what they break off, and what they should never have sent.

Imports httpx and the stream reader of `bench serve`. Invariant: every request has an answer that is right, and anything
else raises `WrongError`, with what was asked and what came.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from longfill.bench.serve_prompts import CANDIDATES
from longfill.bench.serve_stream import Stream, StreamError, error_message

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MOST_KEPT = 20
"""Wrong answers of which the text is kept."""


class WrongError(Exception):
    """An answer that should not have come, or none."""


@dataclass
class Tally:
    """What was sent and what came of it."""

    sent: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    """Of prompts and outputs, by the server's count."""
    messages: list[str] = field(default_factory=list)

    def complain(self, kind: str, message: str) -> None:
        """Count a wrong answer."""
        self.wrong[kind] += 1
        if len(self.messages) < MOST_KEPT:
            self.messages.append(f"{kind}: {message}")


class Traffic:
    """Clients of one server, each sending one request after the other until told to stop."""

    def __init__(self, base_url: str, *, long_prompt: int, vocab_size: int, seed: int) -> None:
        self.tally = Tally()
        self._long = long_prompt
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)
        self._known: dict[int, str] = {}
        self._http = httpx.AsyncClient(
            base_url=base_url,
            timeout=httpx.Timeout(300.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
            trust_env=False,
        )
        self._kinds: Mapping[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "stream": (20, self._stream),
            "whole": (10, self._whole),
            "same bits": (10, self._same_bits),
            "chat": (10, self._chat),
            "chat stream": (10, self._chat_stream),
            "long prompt": (5, self._long_prompt),
            "several": (5, self._several),
            "stop string": (5, self._stop_string),
            "logprobs": (5, self._logprobs),
            "form": (5, self._form),
            "cache salt": (3, self._cache_salt),
            "left in prefill": (5, self._left_in_prefill),
            "left in stream": (5, self._left_in_stream),
            "left while whole": (5, self._left_while_whole),
            "bad body": (10, self._bad_body),
        }

    async def run(self, clients: int, until: Callable[[], bool]) -> None:
        """Send from so many clients at a time until `until()`."""
        await asyncio.gather(*(self._client(until) for _ in range(clients)))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _client(self, until: Callable[[], bool]) -> None:
        names = list(self._kinds)
        weights = [self._kinds[name][0] for name in names]
        while not until():
            (kind,) = self._rng.choices(names, weights)
            self.tally.sent[kind] += 1
            try:
                await self._kinds[kind][1]()
            except WrongError as error:
                self.tally.complain(kind, str(error))
            except (httpx.HTTPError, StreamError, ValueError, LookupError, TypeError) as error:
                # No answer, or one of another shape.
                self.tally.complain(kind, f"{type(error).__name__}: {error}")

    # What is sent.

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(count)]

    def _text(self, words: int) -> str:
        return " ".join(self._rng.choices(CANDIDATES, k=words))

    def _body(self, tokens: int, most: int, **fields: Any) -> dict[str, Any]:
        return {"prompt": self._ids(self._rng.randint(1, tokens)), "max_tokens": self._rng.randint(1, most), **fields}

    def _messages(self, words: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": self._text(words)}]

    # Requests that get a whole answer.

    async def _stream(self) -> None:
        body = self._body(512, 64, ignore_eos=True)
        self._check_counts(body, await self._streamed(COMPLETIONS, body))

    async def _whole(self) -> None:
        body = self._body(512, 64, ignore_eos=True)
        answer = await self._answered(COMPLETIONS, body)
        self._check_usage(body, answer["usage"])

    async def _same_bits(self) -> None:
        """A greedy answer is the same beside any traffic."""
        number = self._rng.randrange(8)
        ids = [random.Random(number * 1000 + place).randrange(self._vocab_size) for place in range(100 + 40 * number)]
        body = {"prompt": ids, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = await self._answered(COMPLETIONS, body)
        text = answer["choices"][0]["text"]
        if self._known.setdefault(number, text) != text:
            raise WrongError(f"prompt {number} now says {text!r}, and said {self._known[number]!r}")

    async def _chat(self) -> None:
        answer = await self._answered(CHAT, {"messages": self._messages(200), "max_tokens": 16})
        if answer["choices"][0]["message"]["role"] != "assistant":
            raise WrongError(f"not an assistant's message: {answer['choices'][0]}")

    async def _chat_stream(self) -> None:
        body = {"messages": self._messages(200), "max_tokens": 16, "ignore_eos": True}
        stream = await self._streamed(CHAT, body)
        if stream.count("completion_tokens") != 16:
            raise WrongError(f"16 tokens asked for, usage is {stream.usage}")

    async def _long_prompt(self) -> None:
        body = {"prompt": self._ids(self._long), "max_tokens": 4, "ignore_eos": True}
        self._check_counts(body, await self._streamed(COMPLETIONS, body, prefill_progress=True))

    async def _several(self) -> None:
        body = self._body(256, 16, n=3, temperature=1.0, seed=self._rng.randrange(2**31), ignore_eos=True)
        answer = await self._answered(COMPLETIONS, body)
        if [choice["index"] for choice in answer["choices"]] != [0, 1, 2]:
            raise WrongError(f"not three choices: {answer['choices']}")
        self._check_usage(body, answer["usage"], completions=3)

    async def _stop_string(self) -> None:
        stop = self._rng.choice(("a", "e", "1", "."))
        answer = await self._answered(COMPLETIONS, self._body(256, 48, stop=[stop], temperature=1.0))
        choice = answer["choices"][0]
        if stop in choice["text"]:
            raise WrongError(f"the stop string {stop!r} is in {choice['text']!r}")

    async def _logprobs(self) -> None:
        answer = await self._answered(COMPLETIONS, self._body(256, 8, logprobs=5, ignore_eos=True))
        logprobs = answer["choices"][0]["logprobs"]
        if len(logprobs["tokens"]) != answer["usage"]["completion_tokens"]:
            raise WrongError(f"{len(logprobs['tokens'])} log-probabilities for {answer['usage']}")

    async def _form(self) -> None:
        digits = self._rng.randint(2, 9)
        body = self._body(128, 1, structured_outputs={"regex": f"[0-9]{{{digits}}}"}) | {"max_tokens": 2 * digits}
        text = (await self._answered(COMPLETIONS, body))["choices"][0]["text"].strip()
        if len(text) != digits or not text.isdigit():
            raise WrongError(f"{digits} digits asked for, got {text!r}")

    async def _cache_salt(self) -> None:
        """The prompt is in the cache under its own salt only."""
        ids, salt = self._ids(300), f"{self._rng.random()}"
        for name in (salt, f"{salt}-other"):
            body = {"prompt": ids, "max_tokens": 1, "cache_salt": name}
            usage = (await self._answered(COMPLETIONS, body))["usage"]
            if usage["prompt_tokens_details"]["cached_tokens"]:
                raise WrongError(f"a prompt under a new salt was cached: {usage}")

    # Clients that leave.

    async def _left_in_prefill(self) -> None:
        body = {"prompt": self._ids(self._long), "max_tokens": 8, "stream": True}
        await self._left(body, after=lambda _stream: True)

    async def _left_in_stream(self) -> None:
        body = self._body(256, 1, stream=True, ignore_eos=True) | {"max_tokens": 400}
        await self._left(body, after=lambda stream: len(stream.token_times) >= 3)

    async def _left(self, body: dict[str, Any], after: Callable[[Stream], bool]) -> None:
        stream = Stream(0.0)
        async with self._http.stream("POST", COMPLETIONS, json=body) as response:
            await self._check_status(response)
            async for piece in response.aiter_bytes():
                stream.feed(piece, 0.0)
                self._check_error(stream)
                if after(stream):
                    await asyncio.sleep(self._rng.uniform(0, 0.3))
                    return

    async def _left_while_whole(self) -> None:
        body = {"prompt": self._ids(self._long // 2), "max_tokens": 200, "ignore_eos": True}
        try:
            async with asyncio.timeout(self._rng.uniform(0.02, 0.5)):
                await self._answered(COMPLETIONS, body)
        except TimeoutError:
            return

    # Requests that should never have been sent.

    async def _bad_body(self) -> None:
        path, body = self._rng.choice(BAD_BODIES)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await self._http.post(path, content=content, headers={"content-type": "application/json"})
        if not 400 <= response.status_code < 500 or not response.json()["error"]["message"]:
            raise WrongError(f"{content[:80]!r} gets {response.status_code}: {response.text[:200]}")

    # Answers.

    async def _answered(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        response = await self._http.post(path, json=dict(body))
        await self._check_status(response)
        answer: dict[str, Any] = response.json()
        for choice in answer["choices"]:
            if choice["finish_reason"] not in ("stop", "length"):
                raise WrongError(f"finish reason {choice['finish_reason']}")
        self.tally.tokens += answer["usage"]["total_tokens"]
        return answer

    async def _streamed(self, path: str, body: Mapping[str, Any], **options: Any) -> Stream:
        whole = {**body, "stream": True, "stream_options": {"include_usage": True, **options}}
        stream = Stream(0.0)
        async with self._http.stream("POST", path, json=whole) as response:
            await self._check_status(response)
            async for piece in response.aiter_bytes():
                stream.feed(piece, 0.0)
        self._check_error(stream)
        if not stream.done or stream.finish_reason not in ("stop", "length") or stream.usage is None:
            raise WrongError(f"the stream ended with {stream.finish_reason}, done {stream.done}, {stream.usage}")
        self.tally.tokens += stream.usage["total_tokens"]
        return stream

    @staticmethod
    async def _check_status(response: httpx.Response) -> None:
        if response.status_code != 200:
            await response.aread()
            raise WrongError(f"HTTP {response.status_code}: {error_message(response.text)}")

    @staticmethod
    def _check_error(stream: Stream) -> None:
        if stream.error is not None:
            raise WrongError(f"an error in the stream: {stream.error}")

    def _check_counts(self, body: Mapping[str, Any], stream: Stream) -> None:
        assert stream.usage is not None
        self._check_usage(body, stream.usage)

    @staticmethod
    def _check_usage(body: Mapping[str, Any], usage: Mapping[str, Any], completions: int = 1) -> None:
        expected = (len(body["prompt"]), completions * body["max_tokens"])
        if (usage["prompt_tokens"], usage["completion_tokens"]) != expected:
            raise WrongError(f"prompt and output have {expected} tokens, usage is {usage}")


BAD_BODIES: Sequence[tuple[str, Any]] = (
    (COMPLETIONS, b"{"),
    (COMPLETIONS, b"[]"),
    (COMPLETIONS, b"\xff\xfe"),
    (COMPLETIONS, {}),
    (COMPLETIONS, {"prompt": 5}),
    (COMPLETIONS, {"prompt": [-1]}),
    (COMPLETIONS, {"prompt": [10**12]}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 10**9}),
    (COMPLETIONS, {"prompt": "a", "n": 10**9}),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}),
    (COMPLETIONS, {"prompt": "a", "logprobs": 10**9}),
    (COMPLETIONS, {"prompt": "a", "model": "another"}),
    (COMPLETIONS, {"prompt": "a", "no_such_field": 1}),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "("}}),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 10**5}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user"}]}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 10**9, "logprobs": True}),
    ("/tokenize", {"prompt": 5}),
)

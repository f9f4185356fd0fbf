"""Routes that generate: /v1/chat/completions and /v1/completions, streamed or whole.

Used by the route table. Each turns a body into prompts and parameters, generates, and lets the protocol write the
answer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio
from starlette.responses import Response

from trio_llm.frontend.http.answers.assembly import Choice, Event, Usage, whole_choices
from trio_llm.frontend.http.answers.generation import Generation
from trio_llm.frontend.http.event_stream import EventRenderer, EventStreamResponse
from trio_llm.frontend.http.openai.chat import ChatRequest, chat_params, param_names
from trio_llm.frontend.http.openai.completions import (
    MAX_PROMPTS,
    CompletionRequest,
    check_num_choices,
    completion_params,
    limit_to_room,
)
from trio_llm.frontend.http.openai.prompt_echo import chat_contents, completion_contents
from trio_llm.frontend.http.openai.prompts import parse_prompts
from trio_llm.frontend.http.openai.responses import (
    AnswerHead,
    ChatChunks,
    CompletionChunks,
    chat_answer,
    completion_answer,
)
from trio_llm.frontend.http.request_reader import ApiContext, Call

__all__ = ["chat", "complete"]

WriteAnswer = Callable[[AnswerHead, list[Choice], Usage], bytes]


async def chat(api: ApiContext, call: Call[ChatRequest]) -> Response:
    """POST /v1/chat/completions."""
    request, client = call.body, api.client
    params = chat_params(request, client.model_config.sampling_defaults)
    with call.timeout.within():
        token_ids = await client.renderer.render_chat(
            request.messages,
            add_generation_prompt=request.adds_generation_prompt,
            continue_final_message=bool(request.continue_final_message),
            template_kwargs=request.chat_template_kwargs,
        )
    generation = Generation(
        client=client,
        running=api.running,
        prompts=[token_ids],
        params=params,
        request_id=call.request_id,
        cache_salt=request.cache_salt,
        timeout=call.timeout,
        contents=chat_contents(request, token_ids),
        param_names=param_names(request),
    )
    head = call.head("chatcmpl")
    if not request.stream:
        return await _whole(generation, head, chat_answer)
    chunks = ChatChunks(
        head,
        with_usage=request.wants_usage,
        with_continuous_usage=request.wants_continuous_usage,
        prompt_token_ids=token_ids if request.return_token_ids else None,
    )
    return _stream(api, generation, chunks)


async def complete(api: ApiContext, call: Call[CompletionRequest]) -> Response:
    """POST /v1/completions."""
    request, client = call.body, api.client
    params = completion_params(request, client.model_config.sampling_defaults)
    limit = client.model_config.max_model_len
    given = parse_prompts(request.prompt, name="prompt", most=MAX_PROMPTS, max_model_len=limit)
    check_num_choices(len(given), params.n)
    with call.timeout.within():
        prompts = await client.renderer.render_prompts(given, add_special_tokens=request.adds_special_tokens)
        contents = await completion_contents(request, given, prompts, renderer=client.renderer)
    generation = Generation(
        client=client,
        running=api.running,
        prompts=prompts,
        params=limit_to_room(request, params, room=limit - max(map(len, prompts))),
        request_id=call.request_id,
        cache_salt=request.cache_salt,
        timeout=call.timeout,
        contents=contents,
    )
    head = call.head("cmpl")
    if not request.stream:
        return await _whole(generation, head, completion_answer)
    chunks = CompletionChunks(
        head, with_usage=request.wants_usage, with_continuous_usage=request.wants_continuous_usage
    )
    return _stream(api, generation, chunks)


def _stream(api: ApiContext, generation: Generation, renderer: EventRenderer) -> Response:
    return EventStreamResponse(
        generation,
        renderer,
        keep_alive_s=api.config.sse_keep_alive_interval_s,
        headers={"x-request-id": generation.request_id},
    )


async def _whole(generation: Generation, head: AnswerHead, write_answer: WriteAnswer) -> Response:
    assembler = generation.assembler()
    events: list[Event] = []
    with generation.timeout.within():
        async with generation.open() as outputs:
            async for index, output in outputs:
                events.extend(assembler.feed(index, output))
    assembler.check_finished()
    write = partial(write_answer, head, whole_choices(events), assembler.usage)
    # Log-probabilities of prompts may be a hundred thousand: in a thread, streams get a turn meanwhile.
    is_long = generation.params.prompt_logprobs is not None
    body = await trio.to_thread.run_sync(write, abandon_on_cancel=True) if is_long else write()
    return Response(body, media_type="application/json", headers={"x-request-id": generation.request_id})

"""Routes that generate: /v1/chat/completions and /v1/completions, streamed or whole.

Used by the route table. Each turns a body into prompts and parameters, generates, and lets the protocol write the
answer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import trio
from starlette.responses import Response

from trio_llm.errors import EngineUnavailableError, InvalidRequestError
from trio_llm.frontend.http.answers.assembly import Choice, Event, Usage, whole_choices
from trio_llm.frontend.http.answers.client_names import in_client_names
from trio_llm.frontend.http.answers.generation import Generation
from trio_llm.frontend.http.event_stream import EventRenderer, EventStreamResponse
from trio_llm.frontend.http.openai.chat import ChatRequest, chat_params, param_names
from trio_llm.frontend.http.openai.chunks import ChatChunks, CompletionChunks, StreamUsage
from trio_llm.frontend.http.openai.completions import (
    MAX_PROMPTS,
    CompletionRequest,
    check_num_choices,
    completion_params,
    limit_to_room,
)
from trio_llm.frontend.http.openai.fields import CommonFields
from trio_llm.frontend.http.openai.logprobs import NameToken, token_id_name, token_text
from trio_llm.frontend.http.openai.prompt_echo import chat_contents, completion_contents
from trio_llm.frontend.http.openai.prompts import parse_prompts
from trio_llm.frontend.http.openai.responses import chat_answer, completion_answer
from trio_llm.frontend.http.openai.text_offsets import offsets_of_choices
from trio_llm.frontend.http.request_reader import ApiContext, Call

__all__ = ["chat", "complete"]

WriteAnswer = Callable[[list[Choice], Usage], bytes]


async def chat(api: ApiContext, call: Call[ChatRequest]) -> Response:
    """POST /v1/chat/completions."""
    request, client = call.body, api.client
    params = chat_params(request, client.model_config.sampling_defaults)
    with call.timeout.within():
        try:
            text = await client.renderer.render_chat(
                request.messages,
                add_generation_prompt=request.adds_generation_prompt,
                continue_final_message=bool(request.continue_final_message),
                template_kwargs=request.chat_template_kwargs,
            )
            room = params.max_tokens or 1
            token_ids = await client.renderer.render_prompt(text, request.tokenization.for_chat(), room=room)
        except InvalidRequestError as error:
            raise in_client_names(error, {}, prompt="messages") from None
    generation = Generation(
        client=client,
        running=api.running,
        prompts=[token_ids],
        params=params,
        request_id=call.request_id,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
        routing=call.routing,
        arrival_time_s=call.arrival_time_s,
        trace_headers=call.trace_headers,
        timeout=call.timeout,
        contents=chat_contents(request, text, token_ids),
        with_metrics=api.config.enable_per_request_metrics,
        param_names=param_names(request),
        prompt_field="messages",
    )
    head, name_token = call.head("chatcmpl"), _name_token(request)
    if not request.stream:
        return await _whole(api, generation, partial(chat_answer, head, name_token=name_token))
    prompt_fields: dict[str, Any] = {}
    if request.return_token_ids:
        prompt_fields["prompt_token_ids"] = token_ids
    if request.return_prompt_text:
        prompt_fields["prompt_text"] = text
    return _stream(api, generation, ChatChunks(head, _usage(request), name_token, prompt_fields=prompt_fields))


async def complete(api: ApiContext, call: Call[CompletionRequest]) -> Response:
    """POST /v1/completions."""
    request, client = call.body, api.client
    params = completion_params(request, client.model_config.sampling_defaults)
    limit, tokenization = client.model_config.max_model_len, request.tokenization
    given = parse_prompts(
        request.prompt, name="prompt", most=MAX_PROMPTS, max_model_len=None if tokenization.may_cut else limit
    )
    check_num_choices(len(given), params.n)
    with call.timeout.within():
        prompts = await client.renderer.render_prompts(given, tokenization, room=params.max_tokens or 1)
        contents = await completion_contents(request, given, prompts, renderer=client.renderer)
    generation = Generation(
        client=client,
        running=api.running,
        prompts=prompts,
        params=limit_to_room(request, params, room=limit - max(map(len, prompts))),
        request_id=call.request_id,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
        routing=call.routing,
        arrival_time_s=call.arrival_time_s,
        trace_headers=call.trace_headers,
        timeout=call.timeout,
        contents=contents,
        with_metrics=api.config.enable_per_request_metrics,
    )
    make_offsets = None
    if request.logprobs is not None:
        make_offsets = offsets_of_choices(client.renderer.token_table, request, prompts, contents)
    head, name_token = call.head("cmpl"), _name_token(request)
    if not request.stream:
        write = partial(completion_answer, head, name_token=name_token, make_offsets=make_offsets)
        return await _whole(api, generation, write)
    return _stream(api, generation, CompletionChunks(head, _usage(request), name_token, make_offsets=make_offsets))


def _name_token(request: CommonFields) -> NameToken:
    return token_id_name if request.return_tokens_as_token_ids else token_text


def _usage(request: CommonFields) -> StreamUsage:
    return StreamUsage(at_the_end=request.wants_usage, in_every_chunk=request.wants_continuous_usage)


def _stream(api: ApiContext, generation: Generation, renderer: EventRenderer) -> Response:
    return EventStreamResponse(
        generation,
        renderer,
        keep_alive_s=api.config.sse_keep_alive_interval_s,
        headers={"x-request-id": generation.request_id},
    )


async def _whole(api: ApiContext, generation: Generation, write_answer: WriteAnswer) -> Response:
    """
    Raises:
        EngineUnavailableError: the end of a drain has cut the answer. Clients would take a 200 for the whole of it.
    """
    assembler = generation.assembler()
    events: list[Event] = []
    with generation.timeout.within():
        async with generation.open() as outputs:
            async for index, output in outputs:
                events.extend(assembler.feed(index, output))
    assembler.check_finished()
    choices = whole_choices(events)
    if api.running.are_ended and any(choice.finish_reason == "abort" for choice in choices):
        raise EngineUnavailableError("the server is stopping, and had no time to finish this answer; send it again")
    write = partial(write_answer, choices, assembler.usage)
    # Log-probabilities of prompts may be a hundred thousand: in a thread, streams get a turn meanwhile.
    is_long = generation.params.prompt_logprobs is not None
    body = await trio.to_thread.run_sync(write, abandon_on_cancel=True) if is_long else write()
    return Response(body, media_type="application/json", headers={"x-request-id": generation.request_id})

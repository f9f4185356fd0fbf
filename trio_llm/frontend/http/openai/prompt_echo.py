"""Views: what an answer repeats of its prompts, as a request asks for it.

Used by the routes.
"""

from __future__ import annotations

from collections.abc import Sequence

from trio_llm.frontend.http.answers.assembly import TEXT_ONLY, AnswerContents, PromptEcho
from trio_llm.frontend.http.openai.chat import ChatRequest
from trio_llm.frontend.http.openai.completions import CompletionRequest, is_prompt_only
from trio_llm.frontend.rendering.renderer import Renderer
from trio_llm.frontend.requests.input_processor import check_num_scores

__all__ = ["chat_contents", "completion_contents"]


def chat_contents(request: ChatRequest, token_ids: list[int]) -> AnswerContents:
    """
    Args:
        token_ids: of the rendered conversation.

    Raises:
        InvalidRequestError: too many log-probabilities are asked for.
    """
    if request.prompt_logprobs is not None:
        check_num_scores("prompt_logprobs", len(token_ids), request.prompt_logprobs)
    if request.prompt_logprobs is None and not request.return_token_ids:
        return TEXT_ONLY
    return AnswerContents(
        prompts=[PromptEcho(token_ids=token_ids, text="", first_token="")],
        with_token_ids=bool(request.return_token_ids),
        prompt_logprobs=request.prompt_logprobs,
    )


async def completion_contents(
    request: CompletionRequest, given: Sequence[str | list[int]], prompts: Sequence[list[int]], *, renderer: Renderer
) -> AnswerContents:
    """
    Args:
        given: the prompts as the client sent them: text is repeated to the letter.
        prompts: their token ids.

    Cancellation: safe.

    Raises:
        InvalidRequestError: a token id is none of the model's, or too many log-probabilities are asked for.
    """
    echo_logprobs = request.logprobs if request.echo else None
    num_tokens = sum(map(len, prompts)) * (request.n or 1)
    for name, num_top in (("logprobs", echo_logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if num_top is not None:
            check_num_scores(name, num_tokens, num_top)
    if not request.echo and not request.return_token_ids and request.prompt_logprobs is None:
        return TEXT_ONLY
    echoes = []
    for asked, token_ids in zip(given, prompts, strict=True):
        text = first_token = ""
        if request.echo and token_ids:  # one without tokens is refused where it is admitted
            skips = request.skip_special_tokens is not False
            text = asked if isinstance(asked, str) else await renderer.render_text(token_ids, skip_special_tokens=skips)
            first_token = renderer.token_text(token_ids[0])
        echoes.append(PromptEcho(token_ids=token_ids, text=text, first_token=first_token))
    return AnswerContents(
        prompts=echoes,
        with_token_ids=bool(request.return_token_ids),
        echo_logprobs=echo_logprobs,
        prompt_logprobs=request.prompt_logprobs,
        is_prompt_only=is_prompt_only(request),
    )

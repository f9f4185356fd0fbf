"""What answers have besides text, as a request asks for it: above all the parts of prompts that they repeat.

Used by the generating routes.
"""

from __future__ import annotations

from collections.abc import Sequence

from trio_llm.frontend.http.answers.assembly import AnswerContents, PromptEcho
from trio_llm.frontend.http.openai.chat import ChatRequest
from trio_llm.frontend.http.openai.completions import CompletionRequest, is_prompt_only
from trio_llm.frontend.http.openai.logprobs import name_by_id
from trio_llm.frontend.rendering.renderer import Renderer
from trio_llm.frontend.requests.input_processor import check_num_scores

__all__ = ["chat_contents", "completion_contents"]


def chat_contents(request: ChatRequest, text: str, token_ids: list[int]) -> AnswerContents:
    """
    Args:
        text, token_ids: the rendered conversation.

    Raises:
        InvalidRequestError: too many log-probabilities are asked for.
    """
    with_weight_versions = bool(request.return_weight_versions)
    if not request.repeats_prompt:
        return AnswerContents(with_weight_versions=with_weight_versions)
    if request.prompt_logprobs is not None:
        check_num_scores("prompt_logprobs", len(token_ids), request.prompt_logprobs)
    return AnswerContents(
        prompts=[
            PromptEcho(
                token_ids=token_ids,
                text="",
                first_token="",
                whole_text=text if request.return_prompt_text else None,
            )
        ],
        with_token_ids=bool(request.return_token_ids),
        with_weight_versions=with_weight_versions,
        prompt_logprobs=request.prompt_logprobs,
    )


async def completion_contents(
    request: CompletionRequest, given: Sequence[str | list[int]], prompts: Sequence[list[int]], *, renderer: Renderer
) -> AnswerContents:
    """
    Args:
        given: the prompts as the client sent them: text is repeated to the letter, unless it was cut.
        prompts: their token ids, as far as they were not cut off.

    Cancellation: safe.

    Raises:
        InvalidRequestError: the model has no such token id, or too many log-probabilities are asked for.
    """
    echo_logprobs = request.logprobs if request.echo else None
    num_tokens = sum(map(len, prompts)) * (request.n or 1)
    for name, num_top in (("logprobs", echo_logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if num_top is not None:
            check_num_scores(name, num_tokens, num_top)
    with_weight_versions = bool(request.return_weight_versions)
    repeats_prompt = request.echo or request.return_token_ids or request.return_prompt_text
    if not repeats_prompt and request.prompt_logprobs is None:
        return AnswerContents(with_weight_versions=with_weight_versions)
    return AnswerContents(
        prompts=[
            await _echo(request, asked, token_ids, renderer) for asked, token_ids in zip(given, prompts, strict=True)
        ],
        with_token_ids=bool(request.return_token_ids),
        with_weight_versions=with_weight_versions,
        echo_logprobs=echo_logprobs,
        prompt_logprobs=request.prompt_logprobs,
        is_prompt_only=is_prompt_only(request),
    )


async def _echo(
    request: CompletionRequest, asked: str | list[int], token_ids: list[int], renderer: Renderer
) -> PromptEcho:
    is_shown = request.echo or request.return_prompt_text
    if not is_shown or not token_ids:  # a prompt without tokens is refused where it is admitted
        return PromptEcho(token_ids=token_ids, text="", first_token="")
    if isinstance(asked, str) and not request.tokenization.may_cut:
        text = asked
    else:
        skips = request.skip_special_tokens is not False
        text = await renderer.render_text(token_ids, skip_special_tokens=skips)
    whole_text = text if request.return_prompt_text else None
    if not request.echo:
        return PromptEcho(token_ids=token_ids, text="", first_token="", whole_text=whole_text)
    first_token = renderer.token_text(token_ids[0])  # also checks the id
    return PromptEcho(
        token_ids=token_ids,
        text=text,
        first_token=name_by_id(token_ids[0]) if request.return_tokens_as_token_ids else first_token,
        whole_text=whole_text,
        text_offsets=None if request.logprobs is None else await renderer.render_offsets(token_ids, text),
    )

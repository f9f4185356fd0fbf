"""TextOffsets: where the tokens of one answer begin in its text.

Pure. Used by completions with log-probabilities. Sums of the lengths of the tokens' own texts would be wrong wherever a
character is split over tokens, or a token is left out of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trio_llm.frontend.http.answers.assembly import AnswerContents
from trio_llm.frontend.http.openai.completions import CompletionRequest
from trio_llm.frontend.text.detokenizer import Detokenizer, TokenTable, make_detokenizer
from trio_llm.outputs import TokenLogprobs

__all__ = ["MakeOffsets", "TextOffsets", "offsets_of_choices"]


class TextOffsets:
    """Places the tokens of one answer, which are given in their order.

    Args:
        detokenizer: a fresh one, like that which makes the answer's text.
        start: characters of the choice's text in front of the answer.
    """

    def __init__(self, detokenizer: Detokenizer, start: int) -> None:
        self._detokenizer = detokenizer
        self._end = start

    def place(self, positions: Sequence[TokenLogprobs]) -> list[int]:
        """The offset of each token, in characters. Tokens inside a character have that of the character."""
        offsets = []
        for position in positions:
            offsets.append(self._end)
            self._end += len(self._detokenizer.feed((position.sampled.token_id,)))
        return offsets


MakeOffsets = Callable[[int], TextOffsets]
"""By the index of a choice."""


def offsets_of_choices(
    table: TokenTable, request: CompletionRequest, prompts: Sequence[list[int]], contents: AnswerContents
) -> MakeOffsets:
    """A maker of the offsets of each choice of a request.

    Args:
        prompts: token ids; choice i belongs to prompt i // n.
        contents: of the answer; an echoed prompt precedes the answer's text.
    """
    num_choices = request.n or 1

    def make(index: int) -> TextOffsets:
        prompt = index // num_choices
        detokenizer = make_detokenizer(
            table,
            prompts[prompt],
            skip_special_tokens=request.skip_special_tokens is not False,
            spaces_between_special_tokens=request.spaces_between_special_tokens is not False,
        )
        return TextOffsets(detokenizer, len(contents.prompts[prompt].text) if contents.prompts else 0)

    return make

"""A running chat: the model, the conversation, the settings, and the last answer's cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unspool.cli.console import DIM, AnswerWriter, end_line, say
from unspool.cli.conversation import Conversation, Exchange
from unspool.cli.interrupt import Interrupt
from unspool.cli.report import format_stats
from unspool.cli.settings import refuse_tensors
from unspool.errors import ContextError, InputError, UnspoolError, UnsupportedError

if TYPE_CHECKING:
    from unspool.api import LanguageModel
    from unspool.api.prefix import Prefix
    from unspool.outputs import Stats

# Settings with which a call makes its own cache, or reads the whole prompt itself.
_OWN_CACHE = ("cache_implementation", "cache_config", "max_cache_len", "num_beams", "token_healing")


class Session:
    """The state that the loop and the commands of a chat share."""

    def __init__(
        self,
        lm: LanguageModel,
        system: str | None,
        settings: dict[str, Any],
        *,
        is_interactive: bool,
        mark: Mapping[str, Any] | None = None,
    ) -> None:
        self.lm = lm
        self._mark = dict(mark or {})  # apart from the settings, which are listed and saved: it has a key
        self.conversation = Conversation(system)
        self.settings = settings
        self.is_interactive = is_interactive
        self.shows_stats = False
        self.last_stats: Stats | None = None
        self._read: Prefix | None = None  # what the model has read of the conversation: a turn reads only what is new
        self.check(self.conversation, settings)

    def check(self, conversation: Conversation, settings: dict[str, Any]) -> None:
        """Raise the errors that the next call would raise; nothing is computed."""
        refuse_tensors(settings)
        for name in ("logprobs", "prompt_logprobs"):
            if settings.get(name) is not None:
                raise UnsupportedError(f"`{name}` has no place in a chat, which shows text: use unspool run --json")
        if (settings.get("num_return_sequences") or 1) != 1:
            raise UnsupportedError(
                "`num_return_sequences`: a chat goes on from one answer; use unspool run for several"
            )
        try:
            self._start(conversation.messages("Hello"), settings)
        except InputError:
            # It may only be that the context is full, which the settings don't cause.
            self._start(Conversation(conversation.system).messages("Hello"), settings)

    def _start(self, messages: list[dict[str, Any]], settings: dict[str, Any], **more: Any) -> Any:
        """Begin an answer within the model's context: a chat grows without end, and texts decay behind it."""
        answer = self.lm.start(messages, **settings, **self._mark, **more)
        context, asked = self.lm.model.info.max_context, settings.get("max_new_tokens")
        num_read = answer.stats.prompt_tokens
        if context is not None and num_read + (asked if isinstance(asked, int) else 1) > context:
            raise ContextError(
                f"the messages have {num_read} tokens and the model's context ends at {context}; "
                + (f"at most `max_new_tokens={context - num_read}` fit" if num_read < context else "none can follow")
            )
        return answer

    def answer(self, message: str) -> None:
        """Write the model's answer, and keep both; a message that can't be answered is not kept."""
        try:
            answer = self._start(self.conversation.messages(message), self.settings, **self._begin())
        except UnspoolError as error:
            raise self._explain(error, message) from error
        parts: list[str] = []
        reason: str | None = None
        pieces, writer = answer.pieces(), AnswerWriter()
        with Interrupt(is_enabled=self.is_interactive) as interrupt:
            try:
                for piece in pieces:
                    writer.write(piece, is_thought=piece.kind == "thought")
                    if piece.kind == "text":
                        parts.append(piece)
                    reason = piece.finish_reason
                    if interrupt.is_asked:
                        break
            except KeyboardInterrupt:
                if not self.is_interactive:
                    raise
            finally:
                pieces.close()
        self.last_stats = answer.stats
        self._read = answer.as_conversation()
        self._keep(message, "".join(parts), reason)

    def _begin(self) -> dict[str, Any]:
        """The prefix that this turn shares with what the last one read, if the settings allow one."""
        from unspool.api.prefix import make_conversation

        before, self._read = self._read, None
        is_own = any(self.settings.get(name) not in (None, False, 1) for name in _OWN_CACHE)
        if is_own or self.settings.get("use_cache") is False or self.lm.model.info.is_encoder_decoder:
            return {}
        return {"prefix": before if before is not None else make_conversation(self.lm, [], None)}

    def _keep(self, message: str, text: str, reason: str | None) -> None:
        is_stopped = reason is None
        if text or not is_stopped:
            end_line(text)
            self.conversation.exchanges.append(Exchange(message, text, is_stopped))
        if is_stopped:
            say("(stopped)" if text else "(stopped before the first word; your message is forgotten)", DIM)
        elif reason == "length" and self.is_interactive:
            say("(cut off at its longest; /set max_new_tokens N allows more)", DIM)
        if self.shows_stats and self.last_stats is not None:
            say(format_stats(self.last_stats), DIM)

    def count_tokens(self, following: str | None = None) -> int:
        """How many tokens of the context the conversation takes."""
        messages = self.conversation.messages(following)
        return len(self.lm.encode(messages)[0]) if messages else 0

    def _explain(self, error: UnspoolError, message: str) -> UnspoolError:
        """Add what to do if the conversation no longer fits the model's context."""
        context = self.lm.model.info.max_context
        if context is None or not self.conversation.exchanges:
            return error
        asked = self.settings.get("max_new_tokens") or 0
        if self.count_tokens(message) + asked <= context:
            return error
        return InputError(
            f"the conversation no longer fits: {error}. /undo drops the last exchange, /clear all of them; "
            "your message was not sent"
        )

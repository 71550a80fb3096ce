"""Grammars of whole messages: reasoning, then calls that are asked for, or an answer of some shape, or either."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from quire.text.messages import harmony
from quire.text.messages.formats import HARMONY, ToolFormat
from quire.text.messages.grammar import LarkRules, Tools, reasoning_before
from quire.text.messages.reasoning import ReasoningFormat


@dataclass(frozen=True, slots=True)
class MessageGrammar:
    """How the model writes. `inside`: the prompt ends within reasoning, behind it, or says nothing (None).

    `special`: tokens that no text spells. Grammars are Lark for `structured_outputs`; `BadRequest` names the place in
    `tools` of what cannot be forced.
    """

    calling: ToolFormat | None
    reasoning: ReasoningFormat | None
    inside: bool | None
    special: Collection[str]

    def forced(self, tools: Tools, choice: str | None, parallel: bool) -> str:
        """Calls of `choice`, else of any of `tools`, several if `parallel`."""
        rules = LarkRules(self.special)
        return rules.lark(f"{self._before(rules)} {self._calls(rules, tools, choice, parallel)}")

    def free(self, tools: Tools, parallel: bool) -> str:
        """Any text, and perhaps calls behind it, whose arguments are as their schemas say."""
        rules, calling = LarkRules(self.special), self.calling
        assert calling is not None
        before, calls = self._before(rules), calling.frame.calls(rules, tools, None, parallel)
        if self._channels:
            ways = [f"{rules.said(harmony.FINAL)} {rules.text()}",
                    f"({_ended(rules, harmony.WORD)})? {rules.said(calling.frame.opener)} {calls}"]  # fmt: skip
        elif calling.bare:
            text = rules.text(calling.openers)
            ways = [rules.terminal(f"{text} & ~/\\s*\\{calling.bare}(.|\\n)*/"), calls]
        else:
            text = rules.text(calling.openers)
            ways = [text, f"{rules.until(text, (calling.frame.opener,))} {calls}"]
        return rules.lark(f"{before} ({' | '.join(ways)})")

    def around(self, tools: Tools, parallel: bool) -> str:
        """What stands around `@answer`, in whose place `tools` may be called; "" where nothing does."""
        rules = LarkRules(self.special)
        final = rules.said(harmony.FINAL) if self._channels else ""
        ways = [f"{final} @answer"]
        if tools:
            ways.append(self._calls(rules, tools, None, parallel))
        start = f"{self._before(rules)} ({' | '.join(ways)})"
        return "" if start == " ( @answer)" else rules.lark(start)

    @property
    def _channels(self) -> bool:
        return HARMONY in (self.reasoning and self.reasoning.name, self.calling and self.calling.name)

    def _before(self, rules: LarkRules) -> str:
        if self._channels:
            return f"({_ended(rules, harmony.ANALYSIS)})?"
        return "" if self.reasoning is None else reasoning_before(self.reasoning, self.inside, rules)

    def _calls(self, rules: LarkRules, tools: Tools, choice: str | None, parallel: bool) -> str:
        assert self.calling is not None
        frame = self.calling.frame
        return f"{rules.said(frame.opener)} {frame.calls(rules, tools, choice, parallel)}"


def _ended(rules: LarkRules, begin: str) -> str:
    """A whole message of harmony, and the beginning of the next."""
    text = rules.until(rules.text((harmony.ENDS[0],)), (harmony.ENDS[0],))
    return f"{rules.said(begin)} {text} {rules.said(harmony.START + 'assistant')}"

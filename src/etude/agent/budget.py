"""What a session may spend, in sampled tokens and in money, its sub-agents included."""

from __future__ import annotations

import math

from etude.agent.policy import Answer
from etude.inference.prices import Price


class Budget:
    """One account for a session and everything that it starts. `tokens` are sampled ones, `money`
    is in dollars and needs a price. Raises ValueError for money without a price."""

    def __init__(
        self,
        *,
        tokens: int | None = None,
        money: float | None = None,
        price: Price | None = None,
    ) -> None:
        if money is not None and price is None:
            raise ValueError("a budget in money needs the model's price")
        self._tokens = tokens
        self._money = money
        self._price = price
        self.sampled = 0
        self.spent = 0.0

    def charge(self, prompt_tokens: int, cached_tokens: int, sampled_tokens: int) -> float:
        """Book one exchange; returns its dollars (0 without a price)."""
        self.sampled += sampled_tokens
        cost = 0.0
        if self._price is not None:
            cost = self._price.cost(prompt_tokens, cached_tokens, sampled_tokens)
        self.spent += cost
        return cost

    def charge_answer(self, answer: Answer) -> float:
        """Book one answer."""
        return self.charge(answer.prompt_tokens, answer.cached_tokens, answer.sampled_tokens)

    def room(self, prompt_tokens: int) -> tuple[int | None, str]:
        """(how many tokens the next answer to a prompt of this length may have, or None for any
        number; why it is 0). The whole prompt is taken to cost as if nothing were cached."""
        left: list[int] = []
        if self._tokens is not None:
            left.append(self._tokens - self.sampled)
            if left[-1] < 1:
                return 0, f"all {self._tokens} tokens were used"
        if self._money is not None and self._price is not None:
            money = self._money - self.spent - self._price.cost(prompt_tokens, 0, 0)
            if money <= 0:
                return 0, self._too_dear()
            if self._price.output > 0:
                left.append(math.floor(money * 1e6 / self._price.output))
                if left[-1] < 1:
                    return 0, self._too_dear()
        return (min(left) if left else None), ""

    def _too_dear(self) -> str:
        assert self._money is not None
        spent = f"${self.spent:.4f} of ${self._money:.4f} were spent"
        if self.spent >= self._money:
            return spent
        return f"{spent}, and the next turn could cost more than what is left"

    def remaining(self) -> str:
        """What is left, in words, or '' when nothing was set."""
        parts: list[str] = []
        if self._tokens is not None:
            parts.append(f"{max(0, self._tokens - self.sampled)} tokens")
        if self._money is not None:
            parts.append(f"${max(0.0, self._money - self.spent):.2f}")
        return " and ".join(parts)

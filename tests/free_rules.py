"""A compiled grammar that allows every token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pd.engine.rule_budget import RuleBudget


class FreeRules:
    """See :class:`pd.engine.token_rules.TokenRules`."""

    has_ended = jumps_forward = is_quick = False
    first_mask = None

    def __init__(self, budget: RuleBudget) -> None:
        self.budget = budget

    def ends_with(self, token: int) -> bool:
        return False

    def fork_rules(self) -> FreeRules:
        return self

    def fill_mask(self, mask: Any) -> None:
        mask[:] = -1

    def accept_token(self, token: int) -> bool:
        return True

    def roll_back(self, count: int) -> None:
        """Do nothing, because there is no state."""

    def find_forced(self, ids: Any) -> list[int]:
        return []


class MakeFreeRules:
    """See :class:`pd.grammar.grammars.MakeRules`."""

    def for_request(self, budget: RuleBudget) -> MakeFreeRules:
        self._budget = budget
        return self

    def check_choices(self, params: Any) -> None:
        return None

    def has_first_mask(self, ending: Any) -> bool:
        return True

    def __call__(self, ending: Any) -> FreeRules:
        return FreeRules(self._budget)

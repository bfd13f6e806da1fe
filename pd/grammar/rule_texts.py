"""Reads grammars printed by xgrammar: one line per rule, in the order of their numbers."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# We read at most this many characters of a printed grammar.
_MAX_CHARACTERS = 1 << 19
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
# Strings, classes of characters (both may contain anything), and names.
_PART = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|[\w.\-]+|\(=|\|')
# Largest number of rules from each group of mutually recursive rules.
_MAX_OF_GROUP = 2
_FOLLOWED_BY = "(="
# We ignore shorter constants, because byte-by-byte outputs contain them.
_LEAST_CONSTANT = 4


def find_constants(text: str) -> Iterator[bytes]:
    """Yield the quoted texts of a grammar, each once, without unreadable ones."""
    known = set[str]()
    for match in _STRING.finditer(text[:_MAX_CHARACTERS]):
        quoted = match[1]
        if len(quoted) < _LEAST_CONSTANT or quoted in known:
            continue
        known.add(quoted)
        try:
            yield codecs.decode(
                quoted.encode("ascii", "backslashreplace"), "unicode_escape"
            ).encode()
        except ValueError:  # it ends inside a character
            continue


def find_recursive_rules(text: str) -> Iterator[tuple[str, str]]:
    """Yield rules with an alternative that contains the rule several times, maybe indirectly.

    Rules with most occurrences come first. We yield at most ``_MAX_OF_GROUP`` mutually recursive
    rules. Each comes with an EBNF grammar of the rules it needs.
    """
    lines, names = list[str](), list[str]()
    for line in text[:_MAX_CHARACTERS].splitlines():
        name, mark, _ = line.partition(" ::= ")
        if mark:
            names.append(name)
            lines.append(line)
    numbers = {name: number for number, name in enumerate(names)}
    alternatives = [_split_references(line.partition(" ::= ")[2], numbers) for line in lines]
    reached = [{rule for each in rules for rule in each} for rules in alternatives]
    groups = _number_components(reached)
    occurrences: dict[int, int] = {}
    for number, rules in enumerate(alternatives):
        inside = (sum(groups[rule] == groups[number] for rule in each) for each in rules)
        occurrences[number] = max(inside, default=0)
    yielded = Counter[int]()
    for number in sorted(occurrences, key=lambda number: -occurrences[number]):
        if occurrences[number] < 2:
            return
        yielded[groups[number]] += 1
        if yielded[groups[number]] <= _MAX_OF_GROUP:
            yield names[number], "\n".join(lines[rule] for rule in _collect_needed(number, reached))


def _collect_needed(first: int, reached: list[set[int]]) -> list[int]:
    """Return a rule and all rules it needs."""
    needed, work = {first: None}, [first]
    while work:
        for rule in reached[work.pop()]:
            if rule not in needed:
                needed[rule] = None
                work.append(rule)
    return list(needed)


def _split_references(body: str, numbers: dict[str, int]) -> list[list[int]]:
    """Return the rules named by each alternative of a rule.

    We stop at ``(=``, because there xgrammar prints text that follows the rule.
    """
    alternatives: list[list[int]] = [[]]
    for part in _PART.findall(body):
        if part == _FOLLOWED_BY:
            break
        if part == "|":
            alternatives.append([])
        elif part in numbers:
            alternatives[-1].append(numbers[part])
    return alternatives


def _number_components(reached: list[set[int]]) -> list[int]:
    """Number the strongly connected components of rules, with Tarjan's algorithm (1972).

    Rules with the same number reach each other.
    """
    order, low = [0] * len(reached), [0] * len(reached)
    component, stack, on_stack = [-1] * len(reached), list[int](), set[int]()
    count = groups = 0
    for start in range(len(reached)):
        if order[start]:
            continue
        work = [(start, iter(reached[start]))]
        count += 1
        order[start] = low[start] = count
        stack.append(start)
        on_stack.add(start)
        while work:
            rule, others = work[-1]
            for other in others:
                if not order[other]:
                    count += 1
                    order[other] = low[other] = count
                    stack.append(other)
                    on_stack.add(other)
                    work.append((other, iter(reached[other])))
                    break
                if other in on_stack:
                    low[rule] = min(low[rule], order[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[rule])
                if low[rule] == order[rule]:
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component[member] = groups
                        if member == rule:
                            break
                    groups += 1
    return component

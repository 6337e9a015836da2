"""Regular expressions of model folders, matched in bounded time.

Configs name layers by regular expressions. They come with a model, so a hostile one must not hang the start, which
Python's own matcher allows. Here a part of an expression takes all places where it may begin to all where it may end,
so nothing is tried twice, and the steps are counted.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from octavo.worker.errors import ModelConfigError

MAX_PATTERN_LENGTH = 1024
MAX_NAME_LENGTH = 512
MAX_STEPS = 100_000
MAX_DEPTH = 16
MAX_COUNT = 100
_DIGITS = frozenset("0123456789")
_WORD = _DIGITS | frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_SPACE = frozenset(" \t\n\r\f\v")
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}

Places: TypeAlias = int
"""Places in a name, as bits: bit i is the place before character i."""


class Pattern:
    """A regular expression, matched from the beginning of a name as `re.match` does.

    It may hold characters, `.`, classes, `\\d \\w \\s` and their opposites, groups, alternatives, repetition, `^`, `$` and
    lookahead. Names are plain ASCII; what Python would do with others is not promised.

    Raises:
        ModelConfigError: it is malformed, too long, or holds something else.
    """

    def __init__(self, expression: str) -> None:
        if len(expression) > MAX_PATTERN_LENGTH:
            raise ModelConfigError(
                f"pattern {expression[:40]!r}... has {len(expression)} characters, limit {MAX_PATTERN_LENGTH}"
            )
        self._root = _Parser(expression).parse()

    def matches(self, name: str) -> bool:
        """Say whether the expression matches at the beginning of a name.

        Raises:
            ModelConfigError: the name is too long, or the match takes too many steps.
        """
        if len(name) > MAX_NAME_LENGTH:
            raise ModelConfigError(f"layer name {name[:40]!r}... has {len(name)} characters, limit {MAX_NAME_LENGTH}")
        return self._root.after(_Subject(name), 1) != 0


class _Subject:
    """A name that is matched."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._steps = 0

    def step(self) -> None:
        """Count a part that is tried.

        Raises:
            ModelConfigError: it is one too many.
        """
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise ModelConfigError(f"a pattern takes more than {MAX_STEPS} steps to match {self.name!r}")


class _Node:
    def after(self, subject: _Subject, starts: Places) -> Places:
        """Return where this part may end, begun at any of some places."""
        raise NotImplementedError


@dataclass(eq=False)
class _One(_Node):
    """One character of a set, or not of it."""

    characters: frozenset[str]
    negated: bool = False

    def after(self, subject: _Subject, starts: Places) -> Places:
        subject.step()
        return _where(subject, starts, lambda rest: rest != "" and (rest[0] in self.characters) != self.negated) << 1


@dataclass(eq=False)
class _Sequence(_Node):
    parts: list[_Node] = field(default_factory=list)

    def after(self, subject: _Subject, starts: Places) -> Places:
        subject.step()
        for part in self.parts:
            starts = part.after(subject, starts) if starts else 0
        return starts


@dataclass(eq=False)
class _Either(_Node):
    parts: list[_Node]

    def after(self, subject: _Subject, starts: Places) -> Places:
        subject.step()
        found = 0
        for part in self.parts:
            found |= part.after(subject, starts)
        return found


@dataclass(eq=False)
class _Repeat(_Node):
    part: _Node
    least: int
    most: int | None

    def after(self, subject: _Subject, starts: Places) -> Places:
        subject.step()
        for _ in range(self.least):
            starts = self.part.after(subject, starts)
        reached = fresh = starts
        turns = self.least
        while fresh and (self.most is None or turns < self.most):
            fresh = self.part.after(subject, fresh) & ~reached
            reached |= fresh
            turns += 1
        return reached


@dataclass(eq=False)
class _Ahead(_Node):
    part: _Node
    wanted: bool

    def after(self, subject: _Subject, starts: Places) -> Places:
        found = 0
        for place in _each(starts):
            subject.step()
            found |= (bool(self.part.after(subject, 1 << place)) == self.wanted) << place
        return found


@dataclass(eq=False)
class _At(_Node):
    """A place that is asked for: the beginning or the end."""

    end: bool

    def after(self, subject: _Subject, starts: Places) -> Places:
        subject.step()
        # As Python has it, the end is also before a line break at the end.
        return _where(subject, starts, lambda rest: rest in ("", "\n")) if self.end else starts & 1


def _where(subject: _Subject, starts: Places, holds: Callable[[str], bool]) -> Places:
    """Return those places behind which the rest of the name is as asked."""
    return sum(1 << place for place in _each(starts) if holds(subject.name[place:]))


def _each(places: Places) -> Iterator[int]:
    while places:
        lowest = places & -places
        yield lowest.bit_length() - 1
        places ^= lowest


class _Parser:
    """Recursive descent over an expression."""

    def __init__(self, expression: str) -> None:
        self._text = expression
        self._place = 0
        self._depth = 0

    def parse(self) -> _Node:
        node = self._either()
        if self._place < len(self._text):
            raise self._error("a group is closed that was not opened")
        return node

    def _either(self) -> _Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"groups nest deeper than {MAX_DEPTH}")
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        self._depth -= 1
        return parts[0] if len(parts) == 1 else _Either(parts)

    def _sequence(self) -> _Node:
        sequence = _Sequence()
        while self._place < len(self._text) and self._text[self._place] not in "|)":
            sequence.parts.append(self._repeated(self._atom()))
        return sequence

    def _repeated(self, atom: _Node) -> _Node:
        bounds = self._bounds()
        if bounds is None:
            return atom
        if isinstance(atom, _At | _Ahead):
            raise self._error("nothing to repeat")
        self._take("?")  # lazily or not, the same names match
        if self._place < len(self._text) and self._text[self._place] in "*+?":
            raise self._error("a repetition of a repetition")
        return _Repeat(atom, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        if not self._take("{"):
            return None
        inside, closed, rest = self._text[self._place :].partition("}")
        least, comma, most = inside.partition(",")
        numbers = [part for part in (least, most) if part]
        if not closed or not numbers or not all(part.isdecimal() and part.isascii() for part in numbers):
            raise self._error("a brace that holds no bounds; write \\{ for the character")
        self._place = len(self._text) - len(rest)
        low = int(least or 0)
        high = low if not comma else int(most) if most else None
        if max(low, high or 0) > MAX_COUNT or (high is not None and high < low):
            raise self._error(f"bounds {{{inside}}}: expected 0 to {MAX_COUNT}, rising")
        return low, high

    def _atom(self) -> _Node:
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            return self._class()
        if character == ".":
            return _One(frozenset("\n"), negated=True)
        if character == "^":
            return _At(end=False)
        if character == "$":
            return _At(end=True)
        if character == "\\":
            characters, negated = self._escape()
            return _One(characters, negated)
        if character in "*+?{":
            raise self._error("nothing to repeat")
        return _One(frozenset(character))

    def _group(self) -> _Node:
        wanted: bool | None = None
        if self._take("?"):
            if self._take("="):
                wanted = True
            elif self._take("!"):
                wanted = False
            elif not self._take(":"):
                raise self._error("a group that is neither plain, (?:, (?= nor (?!")
        inner = self._either()
        if not self._take(")"):
            raise self._error("a group that is not closed")
        return inner if wanted is None else _Ahead(inner, wanted)

    def _escape(self) -> tuple[frozenset[str], bool]:
        character = self._next()
        if character.lower() in _CLASSES:
            return _CLASSES[character.lower()], character.isupper()
        if character in _CONTROL:
            return frozenset(_CONTROL[character]), False
        if character.isalnum():
            raise self._error(f"\\{character}")
        return frozenset(character), False

    def _class(self) -> _Node:
        negated = self._take("^")
        characters: frozenset[str] = frozenset()
        first = True
        while first or not self._take("]"):
            first = False
            low = self._class_member()
            rest = self._text[self._place : self._place + 2]
            if len(low) == 1 and rest.startswith("-") and rest not in ("-", "-]"):
                self._place += 1
                low = self._range(low, self._class_member())
            characters |= low
        return _One(characters, negated)

    def _class_member(self) -> frozenset[str]:
        character = self._next()
        if character != "\\":
            return frozenset(character)
        characters, negated = self._escape()
        if negated:
            raise self._error("the opposite of a class within a class")
        return characters

    def _range(self, low: frozenset[str], high: frozenset[str]) -> frozenset[str]:
        if len(high) != 1:
            raise self._error("a range that ends in a class")
        (first,), (last,) = low, high
        if not first <= last <= "\x7f":
            raise self._error(f"range {first}-{last}")
        return frozenset(chr(code) for code in range(ord(first), ord(last) + 1))

    def _next(self) -> str:
        if self._place == len(self._text):
            raise self._error("it ends too early")
        self._place += 1
        return self._text[self._place - 1]

    def _take(self, text: str) -> bool:
        if not self._text.startswith(text, self._place):
            return False
        self._place += len(text)
        return True

    def _error(self, what: str) -> ModelConfigError:
        return ModelConfigError(f"pattern {self._text!r} is not supported: {what} (at character {self._place})")

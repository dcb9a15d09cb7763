"""Makes rows from records: which column holds what, in the common shapes of data.

A record has a prompt and an answer, a conversation (`messages`, or ShareGPT's `conversations`), or Alpaca's
`instruction`, `input` and `output`; or it is a text without roles. Every record has a place, such as `train.jsonl:17`,
which errors name.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from flowrl.errors import ConfigError
from flowrl.messages.base import scalar_problem
from flowrl.tasks.checks.answer_checks import CHECKS, NEEDED
from flowrl.tasks.checks.code_tests import CASE_S, TOTAL_S, is_time, missing_tests
from flowrl.tasks.checks.maths import is_readable
from flowrl.tasks.row_reading.message_shapes import (
    ALPACA,
    ROLES,
    alpaca_prompt,
    from_sharegpt,
    is_turn,
    make_definitions,
    make_turns,
    reply_text,
    with_messages,
    with_system,
)
from flowrl.tasks.row_reading.record_formats import (
    LowScore,
    Malformed,
    NothingInIt,
    RawRow,
    column_hint,
    missing_column,
)
from flowrl.tasks.rows import Row, Turns

MALFORMED, WHERE, TEXTS = ("stop", "skip"), ("auto", "memory", "disk"), ("messages", "raw")
"""Values of the options `malformed`, `rows` and `text`."""
CONVERSED = ("messages", "conversations")
"""Columns that hold a conversation, if no option names one."""
CONVERSATIONS, INSTRUCTION, OUTPUT = "conversations", "instruction", "output"
"""Columns of ShareGPT and of Alpaca that hold the question, and Alpaca's for the answer."""
COMPLETION = "completion"
"""The column of the response, which is also the answer if there is none."""
NO_SCORE = "-"
"""Value of the option `score` for rows that have none, whatever columns they have."""
NUMERAL = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")


@dataclass(frozen=True)
class Keys:
    """Options of a task on disk: which column holds what."""

    prompt: str = ""
    """Column of the question: text, or a conversation as a list of {role, content}. "": the column `prompt`, or another
    shape if there is no such column."""
    messages: str = ""
    """Column of a conversation, whose last turn is the answer if it is the assistant's and no answer is named. "": the
    column `messages` if there is no prompt."""
    answer: str = ""
    """Column of the answer: text, a number, or a list of one turn of the assistant's. "": the column `answer`, or
    `completion` if there is no `answer`; if there are both, `completion` is what is learned from."""
    score: str = "score"
    """Column of an answer's score: among several answers to one prompt, the highest is taken. `-`: there is none."""
    min_score: float = -math.inf
    """Rows with a lower score are left out."""
    chosen: str = "chosen"
    """Column of a pair's better completion: a text, or messages that follow the prompt's or include them."""
    rejected: str = "rejected"
    completion: str = "completion"
    """Column of a labelled completion; its `label` is true (desirable) or false."""
    label: str = "label"
    tools: str = "tools"
    """Column with definitions of the tools that a conversation may call, as a list or as JSON text; none: there are no
    tools."""
    text: str = "messages"
    """What a text is that lists messages, as JSON: these messages, or raw text."""
    split: str = "train"
    """Datasets with several splits: the one to read."""
    config: str = ""
    """Datasets of the Hub with several configurations: the one to read."""
    check: str = "exact"
    """How responses are compared with answers: exact, math (the last number or formula, by math-verify), gsm8k (the
    number after ####, or the last one), boxed (the last \\boxed{}), choice (the letter of a multiple choice), code (a
    Python program, run in a sandbox against the answer's tests)."""
    case_s: float = CASE_S
    """For check=code: seconds for each test of an answer. A row's own column of this name takes precedence."""
    total_s: float = TOTAL_S
    """For check=code: seconds for all tests of one response. A row's own column of this name takes precedence."""
    malformed: str = "stop"
    """Rows that cannot be used: stop before training, or skip and count them."""
    rows: str = "auto"
    """Where rows are: memory; disk, from which each is read when it is needed; auto, which is disk for files of more
    than 256 MiB."""

    def __post_init__(self) -> None:
        _require_choices(self, check=tuple(CHECKS), malformed=MALFORMED, rows=WHERE, text=TEXTS)
        for name, value in self.code_limits.items():
            if self.check != "code":
                raise ConfigError(f"option {name} of a task is for check=code, and this one has check={self.check}")
            if not 0 < value < math.inf:
                raise ConfigError(f"option {name} of a task is {value:g}; it has to be above 0")

    @property
    def prompt_column(self) -> str:
        """The column of the prompt, whether an option names it or not."""
        return self.prompt or "prompt"

    @property
    def messages_column(self) -> str:
        """The column of the conversation, whether an option names it or not."""
        return self.messages or "messages"

    @property
    def answer_column(self) -> str:
        """The column of the answer, whether an option names it or not."""
        return self.answer or "answer"

    def open_messages(self, record: RawRow) -> RawRow:
        """The record with the messages that its columns of conversations and responses hold as text."""
        if self.text == "raw":
            return record
        asked = (self.prompt_column, self.messages_column, CONVERSATIONS, INSTRUCTION)
        replied = (self.answer_column, COMPLETION, OUTPUT, self.chosen, self.rejected, self.completion)
        return with_messages(record, {*asked, *replied})

    @property
    def code_limits(self) -> dict[str, float]:
        """The limits for programs of check=code that differ from the default, by the names of their columns."""
        given = {"case_s": (self.case_s, CASE_S), "total_s": (self.total_s, TOTAL_S)}
        return {name: value for name, (value, usual) in given.items() if value != usual}


@dataclass(frozen=True)
class TextKeys:
    """Options of a task whose rows are texts."""

    text: str = "text"
    """The column that holds the text."""
    split: str = "train"
    """Datasets with several splits: the one to read."""
    config: str = ""
    """Datasets of the Hub with several configurations: the one to read."""
    malformed: str = "stop"
    """Rows that cannot be used: stop before training, or skip and count them."""
    rows: str = "auto"
    """Where texts and their tokens are: memory; disk; auto, which is disk for files of more than 256 MiB."""

    def __post_init__(self) -> None:
        _require_choices(self, malformed=MALFORMED, rows=WHERE)


def _require_choices(keys: object, **choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless each of these options has one of its values."""
    for name, known in choices.items():
        if getattr(keys, name) not in known:
            raise ConfigError(f"option {name} of a task is {getattr(keys, name)!r}; it needs {', or '.join(known)}")


# Rows


def make_text_row(keys: TextKeys, place: str, record: RawRow) -> tuple[Row, ...]:
    """The row of one record that is a text without roles. Raises Malformed."""
    text = record.get(keys.text)
    if not isinstance(text, str):
        there = f"is {str(text)[:60]!r}" if keys.text in record else f"is missing (there are {', '.join(record)})"
        raise Malformed(
            f"{place}: the column {keys.text!r} {there}; it needs text; to use another column, name it after the "
            "task's name: FILE:text=COLUMN"
        )
    row = Row(({"role": "user", "content": text},), place=place)
    if not text.strip():
        raise NothingInIt(f"{place}: the text is empty")
    return (row,)


def make_row(keys: Keys, place: str, record: RawRow, *, compared: bool = True) -> tuple[Row, ...]:
    """The row of one record. Raises Malformed, and LowScore if the record's score is below `min_score`.

    `compared`: the task's own verifier compares responses with its answer.
    """
    told = keys.open_messages(record)
    column = _asking_column(place, record, keys)
    of_alpaca = column == INSTRUCTION and column not in (keys.prompt, keys.messages)
    turns, reference = _read_question(place, told, keys, column, of_alpaca=of_alpaca)
    tools = tools_of(place, record, keys)

    # Rewards receive the columns that the record's shape does not use. With check=code they include the time limits of
    # the row's programs: its own, or else those of the task's options.
    used = {keys.prompt_column, keys.messages_column, keys.answer_column, "answer", "system", column}
    used |= {*ALPACA} if of_alpaca else set()
    columns = {key: plain_value(value) for key, value in record.items() if key not in used}
    for name in ("case_s", "total_s") if keys.check == "code" else ():
        value = _number_in_cell(record.get(name))
        if value is not None and not is_time(value):
            raise Malformed(f"{place}: the column {name!r} is {value!r}; it needs a number of seconds above 0")
        if (limit := keys.code_limits.get(name) if value is None else value) is not None:
            columns[name] = limit
    columns |= {} if reference.answer is None else {"answer": reference.answer}
    columns |= {"tools": tools} if tools else {}

    asked = (column, *reference.columns)
    other = next((name for name in CONVERSED if isinstance(told.get(name), list)), "")
    row = Row(
        turns,
        columns,
        score_of(place, record, keys),
        as_messages=not isinstance(told[column], str),
        tools=tools,
        reply=reference.reply,
        place=place,
        opened=tuple(name for name in asked if told.get(name) is not record.get(name)),
        unread=other if column == keys.prompt_column else "",
    )
    row.require_short()
    require_score(place, row.score, keys)
    if keys.malformed == "skip" and (needed := _missing_in_answer(keys.check, row, compared=compared)):
        raise Malformed(f"{place}: the answer is {str(row.answer)[:60]!r}, and check={keys.check} needs {needed}")
    return (row,)


def _missing_in_answer(check: str, row: Row, *, compared: bool) -> str:
    """What the check needs and the row's answer does not have; "" if nothing is missing. `malformed=skip` leaves such
    rows out; without it, `flowrl.tasks.check_answers` reports them before a run.

    A row without an answer lacks nothing: it is a prompt for a teacher, or for a reward that needs no answer. An answer
    that is a list or mapping lacks nothing either, unless the task's own verifier compares with it (`compared`).
    """
    if row.answer is None:
        return ""
    if check == "code":
        return missing_tests(row.answer, row.columns.get("entry_point"))
    if not row.text_answer:
        return "a text" if compared else ""
    answer = str(row.answer)
    if check == "math":
        return "" if is_readable(answer) else "a number or formula"
    needed, find = NEEDED.get(check, ("", bool))
    return needed if needed and find(answer) is None else ""


def tools_of(place: str, record: RawRow, keys: Keys) -> Turns:
    """The definitions of a record's tools. A column that an option names must exist. Raises Malformed."""
    if keys.tools == "none":
        return ()
    if keys.tools not in record and keys.tools != "tools":
        raise missing_column(place, record, keys.tools, "tools")
    return make_definitions(place, record.get(keys.tools), keys.tools)


# Questions


def _asking_column(place: str, record: RawRow, keys: Keys) -> str:
    """The column that holds the question, which determines the record's shape. Raises Malformed if there is none.

    A column that an option names must exist: no other column replaces it.
    """
    named = [name for name in (keys.prompt, keys.messages) if name]
    for column in named or (keys.prompt_column, keys.messages_column, CONVERSATIONS):
        if column in record:
            return column
    if not named and INSTRUCTION in record and OUTPUT in record:
        return INSTRUCTION
    wanted = named[0] if named else keys.prompt_column
    option = "messages" if wanted == keys.messages else "prompt"
    hint = column_hint(record, wanted, option)
    other = "" if named else ", or messages= to that of a conversation"
    raise Malformed(f"{place}: no column {wanted!r}; {hint} (after the task's name: FILE:{option}=COLUMN){other}")


def _read_question(
    place: str, record: RawRow, keys: Keys, column: str, *, of_alpaca: bool
) -> tuple[Turns, RightResponse]:
    """The messages before the response, and what the record says about the response. `of_alpaca`: the column is
    Alpaca's, rather than named by an option."""
    if of_alpaca:
        told = alpaca_prompt(place, record)
        turns = make_conversation(place, told, "instruction with its input and history")
        reference = _read_answer(place, record, keys, response=OUTPUT)
    elif column == keys.messages or column not in (keys.prompt_column, INSTRUCTION):
        turns = make_conversation(place, record[column], f"column {column!r}", may_end=True)
        if turns[-1]["role"] != "assistant":
            reference = _read_answer(place, record, keys)
        else:
            last, turns = turns[-1:], require_prompt(place, turns, column)
            reference = (
                _read_answer(place, record, keys) if keys.answer else _response_of_turns(place, last, "last message")
            )
    else:
        turns = make_conversation(place, record[column], "prompt")
        reference = _read_answer(place, record, keys)
    return with_system(turns, record), reference


def require_prompt(place: str, turns: Turns, column: str) -> Turns:
    """The turns before the last one, which is the answer. Raises Malformed if there are none."""
    if len(turns) < 2:
        raise Malformed(f"{place}: the column {column!r} holds only an answer; it needs the prompt before the answer")
    return turns[:-1]


def make_conversation(place: str, value: object, what: str, *, may_end: bool = False) -> Turns:
    """The turns of a text or of a list of turns, also in ShareGPT's form. With `may_end` the last may be the
    assistant's.

    Raises Malformed.
    """
    value = from_sharegpt(value)
    if isinstance(value, str) and value.strip():
        return ({"role": "user", "content": value},)
    if isinstance(value, list) and value and all(is_turn(turn) for turn in value):
        if may_end or value[-1]["role"] != "assistant":
            return make_turns(place, value, what)
        raise Malformed(f"{place}: the {what} ends with the assistant's turn; end it with the user's")
    raise Malformed(
        f"{place}: the {what} is {str(value)[:60]!r}; it needs text, or a list of {{'role': ..., 'content': text}} "
        f"with the roles {', '.join(ROLES)}"
    )


# Answers


@dataclass(frozen=True)
class RightResponse:
    """What a record says about the response to its prompt."""

    answer: Any = None
    """What rewards compare with: text, a number, or a list or mapping such as a program's tests. None: nothing."""
    reply: Turns = ()
    """The response to learn from, unless it is the text of `answer`: the record has a response apart from the answer,
    or the response calls tools."""
    columns: tuple[str, ...] = ()
    """Where the two were found."""


def _read_answer(place: str, record: RawRow, keys: Keys, *, response: str = COMPLETION) -> RightResponse:
    """What the columns say: the one that an option names, else `answer`, else that of the `response`. If there are
    both of the latter, the answer is what responses are compared with, and the response is what is learned from."""
    if keys.answer and keys.answer not in record:
        raise missing_column(place, record, keys.answer, "answer")
    if keys.answer or is_missing(record.get(response)):
        return _response_in_column(place, record, keys.answer_column)
    learned = _response_in_column(place, record, response)
    if "answer" not in record:
        return learned
    compared = _response_in_column(place, record, "answer")
    if not isinstance(learned.answer, str):  # a column of this name that holds no response
        return compared
    reply = learned.reply or ({"role": "assistant", "content": learned.answer},)
    return RightResponse(compared.answer, reply, ("answer", response))


def _response_in_column(place: str, record: RawRow, column: str) -> RightResponse:
    value = record.get(column)
    if isinstance(value, list) and value and all(map(is_turn, value)) and value[-1]["role"] == "assistant":
        found = _response_of_turns(place, make_turns(place, value, column), column)
        return RightResponse(found.answer, found.reply, (column,))
    if is_missing(value):
        return RightResponse()
    answer = _require_text(place, value, "answer") if isinstance(value, str) else answer_value(value)
    return RightResponse(answer, (), (column,))


def _response_of_turns(place: str, turns: Turns, what: str) -> RightResponse:
    reply = plain_reply(place, turns, what)
    if isinstance(reply, str):
        return RightResponse(reply)
    return RightResponse(_require_text(place, reply_text(reply), "answer"), reply)


def plain_reply(place: str, turns: Turns, what: str) -> str | Turns:
    """The text of a reply that is one message of text, else its turns. Raises Malformed for an empty one."""
    if len(turns) == 1 and turns[0].keys() == {"role", "content"}:
        return _require_text(place, turns[0]["content"], what)
    return turns


def _require_text(place: str, text: str, what: str) -> str:
    if not text.strip():
        raise Malformed(f"{place}: the {what} is empty, so there is nothing to learn from or to compare with")
    return text


def answer_value(value: Any) -> Any:
    """The answer as the record has it; as text if it is a number of more digits than a message can carry."""
    found = plain_value(value)
    return str(value) if isinstance(found, int) and scalar_problem(found) else found


def is_missing(value: object) -> bool:
    """Whether a cell is empty: pandas writes NaN for what is missing."""
    return value is None or (isinstance(value, float) and math.isnan(value))


# Scores and other values


def require_score(place: str, score: float, keys: Keys) -> None:
    """Raise LowScore for a row whose score is below `min_score`."""
    if score < keys.min_score:
        raise LowScore(f"{place}: the score is {score:g}, below min_score={keys.min_score:g}")


def score_of(place: str, record: RawRow, keys: Keys) -> float:
    """The score of a record; 0 if it has none. Raises Malformed if the options name or need the score and it is not a
    finite number."""
    if keys.score not in record and keys.score not in ("score", NO_SCORE):
        raise missing_column(place, record, keys.score, "score")
    value = _number_in_cell(record.get(keys.score, 0.0))
    if isinstance(value, bool | int | float) and -sys.float_info.max <= value <= sys.float_info.max:
        return float(value)
    if keys.score == "score" and keys.min_score == -math.inf:  # a column that happens to have this name
        return 0.0
    raise Malformed(f"{place}: the score is {value!r}; it needs a finite number")


def _number_in_cell(value: Any) -> Any:
    """The number that a cell of a CSV file holds as text; any other value unchanged."""
    return float(value) if isinstance(value, str) and NUMERAL.fullmatch(value) else value


def plain_value(value: Any) -> Any:
    """Convert to values that a message can carry: lists become tuples, decimals become numbers; dates and similar
    values become text."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, Decimal) and value.is_finite():
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, Mapping):
        return {str(key): plain_value(inner) for key, inner in value.items()}
    if isinstance(value, Iterable):
        return tuple(plain_value(inner) for inner in value)
    return str(value)

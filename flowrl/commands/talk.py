"""`flowrl chat MODEL`: a conversation with a model in this process, to see what it says. Starts no Ray."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.commands.model_directories import model_dir
from flowrl.errors import ConfigError, FlowrlError
from flowrl.graph.command_line import parse_options
from flowrl.models import Chat, Policy, TokenizerOptions, check_model, resolve, to_stderr, tokenizer_of
from flowrl.runtime.telemetry.standard_streams import print_text
from flowrl.tasks import Task

HELP = "/reset begins anew, /exit or the end of input leaves"


@dataclass(frozen=True)
class ChatOptions:
    """Options of `flowrl chat`."""

    system_prompt: str = ""
    """First message of the conversation; empty leaves it to the model's chat template."""
    max_tokens: int = 512
    """Maximum number of tokens in a reply."""
    temperature: float = 0.7
    """Sampling temperature; 0: the most likely token."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose probabilities sum up to this."""
    trust_remote_code: bool = False
    """Run the Python files that come with the model."""
    chat_template: str = ""
    """File of a Jinja template to use in place of the model's own; none: the last message's text, without a
    template."""
    chat_template_kwargs: str = ""
    """Values of the chat template's variables, such as enable_thinking=false."""
    tokenizer: TokenizerOptions = TokenizerOptions()
    """Another tokenizer than the model's own, or other special tokens."""
    seed: int | None = None
    """Seed that determines the replies; None: replies differ each time."""

    def make_policy(self, named: str) -> Policy:
        """The model of this name, with the tokenizer and template of the options."""
        return Policy(
            named,
            task=Task(),
            trust_remote_code=self.trust_remote_code,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            tokenizer=self.tokenizer,
        )

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"--max-tokens is {self.max_tokens}; it has to be 1 or more")
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ConfigError("--temperature has to be 0 or more, and --top-p above 0 and at most 1")


def chat_with_model(args: Sequence[str]) -> int:
    """The command; reads lines from the standard input."""
    if not args or args[0].startswith("-"):
        if args and args[0] in ("-h", "--help"):
            parse_options(ChatOptions, ["--help"], prog="flowrl chat MODEL")
        raise ConfigError("flowrl chat needs a model first: flowrl chat runs/NAME, or flowrl chat MODEL_DIRECTORY")
    options = parse_options(ChatOptions, args[1:], prog="flowrl chat MODEL")
    talk = Talk(_found(args[0], options), options)
    print_text(HELP, stream=sys.stderr)
    for line in _read_lines():
        if line == "/exit":
            break
        if line == "/reset":
            talk.forget_conversation()
            continue
        if re.fullmatch(r"/[a-z]+", line):
            print_text(f"there is no {line}; {HELP}", stream=sys.stderr)
            continue
        try:
            for piece in talk.stream_reply(line):
                print_text(piece, end="", flush=True)
            print_text()
        except _NoRoom as told:
            print_text(told, stream=sys.stderr)
    return 0


class _NoRoom(Exception):
    """The model's context has no room for a reply."""


def _found(named: str, options: ChatOptions) -> Policy:
    """The built-in model of this name, the one on the Hub, or that of a run, a checkpoint or a model's directory."""
    policy = options.make_policy(named)
    found = policy.built_in or policy.hub_name is not None
    return policy if found else options.make_policy(str(model_dir(policy.path)))


def _read_lines() -> Iterator[str]:
    """The lines that a user writes, without empty ones. Raises ConfigError if they are not in the input's encoding."""
    while True:
        if sys.stdin.isatty():
            print_text("> ", end="", flush=True)
        try:
            line = sys.stdin.readline()
            line.encode()  # in some locales, other bytes are read as halves of characters
        except UnicodeError:
            raise ConfigError(
                f"the input is not {sys.stdin.encoding.upper()}; convert it first, as with iconv -f LATIN1 -t UTF-8"
            ) from None
        if not line:
            return
        if line.strip():
            yield line.strip()


class Talk:
    """One conversation with a model."""

    def __init__(self, policy: Policy, options: ChatOptions) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        check_model(policy)
        directory, trusted = resolve(policy, progress=to_stderr), policy.trust_remote_code
        self._tokenizer = tokenizer_of(policy)
        self._chat = Chat(self._tokenizer, options.system_prompt)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", trust_remote_code=trusted).to(
            device
        )
        named: int | list[int] | None = self._model.generation_config.eos_token_id
        ends = named if isinstance(named, list) else [named]
        self._ends = sorted({*ends, self._tokenizer.eos_token_id} - {None})
        """Ids that end a reply. If a model family's turns do not end with the tokenizer's own end token, its
        generation_config names the ids."""
        limit = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        self._max_tokens: int = limit or sys.maxsize
        self._options = options
        self._messages: list[dict[str, str]] = []
        if options.seed is not None:
            torch.manual_seed(options.seed)

    def forget_conversation(self) -> None:
        """Forget what was said."""
        self._messages = []

    def stream_reply(self, text: str) -> Iterator[str]:
        """The pieces of the reply to `text`, as they are sampled."""
        import torch
        from transformers import TextIteratorStreamer

        messages = [*self._messages, {"role": "user", "content": text}]
        ids = torch.from_numpy(self._chat.encode_prompt(messages)[1].astype("int64"))[None].to(self._model.device)
        room = self._max_tokens - ids.shape[1]
        if room < 1:
            raise _NoRoom(f"the conversation fills the model's {self._max_tokens} tokens; {HELP}")
        streamer = TextIteratorStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        settings: dict[str, Any] = {"do_sample": False}
        if self._options.temperature:
            settings = {"do_sample": True, "temperature": self._options.temperature, "top_p": self._options.top_p}
        settings |= {
            "max_new_tokens": min(self._options.max_tokens, room),
            "pad_token_id": self._tokenizer.pad_token_id,
        }
        settings |= {"attention_mask": torch.ones_like(ids), "eos_token_id": self._ends}
        failures: list[Exception] = []

        def generate() -> None:
            try:
                self._model.generate(ids, streamer=streamer, **settings)
            except Exception as failure:  # the model's own code may raise anything; raised again below
                failures.append(failure)
                streamer.end()  # else the loop below would wait

        thread = threading.Thread(target=generate, daemon=True)
        thread.start()
        said = ""
        for piece in streamer:
            said += piece
            yield piece
        thread.join()
        if failures:
            raise FlowrlError(f"the model could not answer: {failures[0]}") from failures[0]
        self._messages = [*messages, {"role": "assistant", "content": said}]

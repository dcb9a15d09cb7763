"""The built-in nodes. Importing them loads no heavy packages; their `setup` does."""

from flowrl.messages.sampling import ReplySchema, Sampling
from flowrl.nodes.curriculum import Curriculum
from flowrl.nodes.engine_options import Engine
from flowrl.nodes.episodes.agent_program import AgentProgram
from flowrl.nodes.episodes.attempt import Limits
from flowrl.nodes.episodes.environment import Environment
from flowrl.nodes.evaluation import Evaluation
from flowrl.nodes.generation.generator import Generator
from flowrl.nodes.groups.advantage import GroupAdvantage, JoinedAdvantage
from flowrl.nodes.groups.batch import AdaptiveKL, TokenBatch
from flowrl.nodes.groups.group_filter import DynamicSampling
from flowrl.nodes.groups.replay import Replay
from flowrl.nodes.groups.selection import BestOfN, PairMaker
from flowrl.nodes.scoring.critic import Critic
from flowrl.nodes.scoring.preference_reference import PreferenceReference
from flowrl.nodes.scoring.reference import Reference
from flowrl.nodes.scoring.reward import Reward
from flowrl.nodes.scoring.reward_model import ProcessReward, RewardModel
from flowrl.nodes.scoring.shaping import Overlong, Shaping
from flowrl.nodes.scoring.teacher import Teacher, TeacherAdvantage
from flowrl.nodes.sources.demonstrations import Demonstrations, DemonstrationSource, StepDataset
from flowrl.nodes.sources.given_answers import GivenAnswers, GivenResponses
from flowrl.nodes.sources.given_rows import HeldOutBatch
from flowrl.nodes.sources.plain_text import TextDataset, Texts, TextSource
from flowrl.nodes.sources.preferences import PreferenceDataset, Preferences, PreferenceSource
from flowrl.nodes.sources.row_checks import PromptLimit, TooLong
from flowrl.nodes.sources.row_source import EnvironmentSource, PromptSource, RowPart, TaskSource
from flowrl.nodes.trainer import Trainer
from flowrl.nodes.writers import PairWriter, RemainingPrompts, ResponseWriter

__all__ = [
    "AdaptiveKL",
    "AgentProgram",
    "BestOfN",
    "Critic",
    "Curriculum",
    "DemonstrationSource",
    "Demonstrations",
    "DynamicSampling",
    "Engine",
    "Environment",
    "EnvironmentSource",
    "Evaluation",
    "Generator",
    "GivenAnswers",
    "GivenResponses",
    "GroupAdvantage",
    "HeldOutBatch",
    "JoinedAdvantage",
    "Limits",
    "Overlong",
    "PairMaker",
    "PairWriter",
    "PreferenceDataset",
    "PreferenceReference",
    "PreferenceSource",
    "Preferences",
    "ProcessReward",
    "PromptLimit",
    "PromptSource",
    "Reference",
    "RemainingPrompts",
    "Replay",
    "ReplySchema",
    "ResponseWriter",
    "Reward",
    "RewardModel",
    "RowPart",
    "Sampling",
    "Shaping",
    "StepDataset",
    "TaskSource",
    "Teacher",
    "TeacherAdvantage",
    "TextDataset",
    "TextSource",
    "Texts",
    "TokenBatch",
    "TooLong",
    "Trainer",
]

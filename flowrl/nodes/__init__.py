"""The built-in nodes. Importing them loads no heavy packages; their `setup` does."""

from flowrl.nodes.agent_programs.agent_program import AgentProgram
from flowrl.nodes.batching.batch import TokenBatch
from flowrl.nodes.batching.running import AdaptiveKL
from flowrl.nodes.curricula.curriculum import Curriculum
from flowrl.nodes.episodes.environment import Environment
from flowrl.nodes.episodes.limits import Limits
from flowrl.nodes.evaluating.evaluation import Evaluation
from flowrl.nodes.evaluating.held_out import HeldOutPreferences
from flowrl.nodes.evaluating.held_out_demonstrations import HeldOutDemonstrations
from flowrl.nodes.generation.generator import Generator
from flowrl.nodes.groups.advantage import GroupAdvantage, JoinedAdvantage
from flowrl.nodes.groups.dynamic import DynamicSampling
from flowrl.nodes.groups.selection import BestOfN, PairMaker
from flowrl.nodes.rewarding.process_reward import ProcessReward
from flowrl.nodes.rewarding.reward import Reward
from flowrl.nodes.rewarding.reward_model import RewardModel
from flowrl.nodes.rewarding.shaping import Overlong, Shaping
from flowrl.nodes.scoring.critic import Critic
from flowrl.nodes.scoring.preference_reference import PreferenceReference
from flowrl.nodes.scoring.reference import Reference
from flowrl.nodes.scoring.teacher import Teacher, TeacherAdvantage
from flowrl.nodes.sources.dataset import Demonstrations, DemonstrationSource
from flowrl.nodes.sources.environment_source import EnvironmentSource
from flowrl.nodes.sources.given_answers import GivenAnswers
from flowrl.nodes.sources.given_responses import GivenResponses
from flowrl.nodes.sources.plain_text import TextDataset, Texts, TextSource
from flowrl.nodes.sources.preference_source import PreferenceDataset, Preferences, PreferenceSource
from flowrl.nodes.sources.row_source import RowPart
from flowrl.nodes.sources.source import PromptSource
from flowrl.nodes.sources.step_dataset import HeldOutSteps, StepDataset
from flowrl.nodes.sources.task_source import TaskSource
from flowrl.nodes.sources.too_long import PromptLimit, TooLong
from flowrl.nodes.trainer import Trainer
from flowrl.nodes.vllm_engine.engine import Engine
from flowrl.nodes.vllm_engine.sampling import Sampling
from flowrl.nodes.writers.pair_writer import PairWriter
from flowrl.nodes.writers.response_writer import RemainingPrompts, ResponseWriter

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
    "HeldOutDemonstrations",
    "HeldOutPreferences",
    "HeldOutSteps",
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

"""The built-in nodes. Importing them loads no heavy packages; their `setup` does."""

from flowrl.nodes.advantage import GroupAdvantage, JoinedAdvantage
from flowrl.nodes.agent_program import AgentProgram
from flowrl.nodes.batch import TokenBatch
from flowrl.nodes.critic import Critic
from flowrl.nodes.curriculum import Curriculum
from flowrl.nodes.dataset import Demonstrations, DemonstrationSource
from flowrl.nodes.dynamic import DynamicSampling
from flowrl.nodes.engine import Engine
from flowrl.nodes.environment import Environment
from flowrl.nodes.environment_source import EnvironmentSource
from flowrl.nodes.evaluation import Evaluation
from flowrl.nodes.generator import Generator
from flowrl.nodes.given_answers import GivenAnswers
from flowrl.nodes.given_responses import GivenResponses
from flowrl.nodes.held_out import HeldOutPreferences
from flowrl.nodes.held_out_demonstrations import HeldOutDemonstrations
from flowrl.nodes.limits import Limits
from flowrl.nodes.pair_writer import PairWriter
from flowrl.nodes.plain_text import TextDataset, Texts, TextSource
from flowrl.nodes.preference_reference import PreferenceReference
from flowrl.nodes.preference_source import PreferenceDataset, Preferences, PreferenceSource
from flowrl.nodes.process_reward import ProcessReward
from flowrl.nodes.reference import Reference
from flowrl.nodes.response_writer import RemainingPrompts, ResponseWriter
from flowrl.nodes.reward import Reward
from flowrl.nodes.reward_model import RewardModel
from flowrl.nodes.running import AdaptiveKL
from flowrl.nodes.sampling import Sampling
from flowrl.nodes.selection import BestOfN, PairMaker
from flowrl.nodes.shaping import Overlong, Shaping
from flowrl.nodes.source import PromptSource
from flowrl.nodes.step_dataset import HeldOutSteps, StepDataset
from flowrl.nodes.task_source import TaskSource
from flowrl.nodes.teacher import Teacher, TeacherAdvantage
from flowrl.nodes.trainer import Trainer

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
    "PromptSource",
    "Reference",
    "RemainingPrompts",
    "ResponseWriter",
    "Reward",
    "RewardModel",
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
    "Trainer",
]

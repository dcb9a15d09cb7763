"""`textarena/NAME`: a game of TextArena, for one player or for several seats.

An observation is what the game has said since the seat's last turn, and what the other seats have done. The seat's own
reply is not repeated: it is in the conversation already. The package's own observations start over at each turn, and
are not used. A single player is told of an invalid move, and may move again as often as the package allows. With
several seats an invalid move loses at once, so that the seats always act in their order.

The number of seats is found by trying 1 and 2; the option `players` gives it for games with more. All other options are
those of the package. Some games need data of NLTK; nothing is downloaded here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from flowrl.environments.environment_class import close_names, import_package
from flowrl.environments.environment_row import EnvironmentName
from flowrl.environments.protocol import Action, Env, MalformedValue, Observation, Step
from flowrl.errors import ConfigError
from flowrl.tasks.user_code import one_line

TRIED_PLAYERS = (1, 2)


class TextarenaEnv(Env):
    """One game. `TextarenaGame` is the same for several seats."""

    @classmethod
    def load_maker(cls, name: EnvironmentName) -> Callable[[], Env]:
        """Imports the package and the game. Raises ConfigError if one is missing, or the game does not take the
        options."""
        package = import_package(name, "textarena", distribution="textarena")
        nltk = import_package(name, "nltk", distribution="nltk")
        nltk.download = lambda *_, **__: False  # games call it at import, and it waits if there is no network
        options = {key: value for key, value in name.options.items() if key != "players"}
        seats = count_players(name, package, options)
        kind = type(cls.__name__, (cls if seats == 1 else TextarenaGame,), {"seats": seats})
        return lambda: kind(package.make(name.place, **options))

    def __init__(self, game: Any) -> None:
        self._game = game
        self._base = unwrap_game(game)

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation | tuple[Observation, ...]:
        self._game.reset(num_players=self.seats, seed=seed)
        return Observation(self._hear_observation())

    async def step(self, action: Action) -> Step:
        over, _ = self._game.step(action=action.text)
        if not over:
            return Step(Observation(self._hear_observation()))
        (reward,), metrics = self._end_step()
        return Step(Observation(self._hear_observation()), reward, terminated=True, metrics=metrics)

    def _hear_observation(self) -> str:
        """What the seat to act has not seen yet."""
        state = self._base.state
        seat, said = self._base.get_observation()
        lines = []
        for sender, text, _ in said:
            name = "" if sender < 0 else f"[{state.role_mapping.get(sender, f'Player {sender}')}] "  # below 0: the game
            if sender != seat:
                lines.append(f"{name}{text.strip()}")
        return "\n\n".join(lines)

    def _end_step(self) -> tuple[tuple[float, ...], dict[str, float]]:
        """Each player's reward, and metrics of the game."""
        rewards, told = self._game.close()
        if rewards is None:
            raise MalformedValue(f"{type(self._base).__name__} ended without rewards")
        invalid = any(told[player].get("invalid_move") for player in range(self.seats))
        by_player = tuple(float(rewards[player]) for player in range(self.seats))
        return by_player, {"turns": float(self._base.state.turn), "invalid_move": float(invalid)}


class TextarenaGame(TextarenaEnv):
    """A game with several seats. Seat 0 is the player who begins, who need not be player 0."""

    async def reset(self, task: Mapping[str, Any], seed: int) -> tuple[Observation, ...]:
        self._game.reset(num_players=self.seats, seed=seed)
        self._base.state.error_allowance = 0
        self._first: int = self._base.state.current_player_id
        return self._shown_to(0)

    async def step(self, action: Action, seat: int = 0) -> Step:
        over, _ = self._game.step(action=action.text)
        if over:
            by_player, metrics = self._end_step()
            rewards = by_player[self._first :] + by_player[: self._first]
            return Step((Observation(),) * self.seats, rewards, terminated=True, metrics=metrics)
        return Step(self._shown_to((seat + 1) % self.seats), (0.0,) * self.seats)

    def _shown_to(self, following: int) -> tuple[Observation, ...]:
        """One observation for each seat: the seat to act sees what was said, the others see it at their own turn.
        Raises MalformedValue if the game asks another seat than `following`."""
        asked = (self._base.state.current_player_id - self._first) % self.seats
        if asked != following:
            raise MalformedValue(
                f"{type(self._base).__name__} asks seat {asked} when it is the turn of seat {following}; only games "
                "whose seats act in their order can be played"
            )
        text = self._hear_observation()
        return tuple(Observation(text if seat == asked else "") for seat in range(self.seats))


def unwrap_game(game: Any) -> Any:
    while "env" in vars(game):
        game = game.env
    return game


def count_players(name: EnvironmentName, package: ModuleType, options: Mapping[str, Any]) -> int:
    """The number of players of the game. Imports the game, once and not in each episode."""
    known = list(package.envs.registration.ENV_REGISTRY)
    if name.place not in known:
        raise ConfigError(f"textarena has no game {name.place!r}; {close_names(name.place, known)}")
    wanted = name.options.get("players")
    try:
        for number in TRIED_PLAYERS if wanted is None else (wanted,):
            if accepts_players(package, package.make(name.place, **options), number, last=number in (2, wanted)):
                return int(number)
    except LookupError as problem:
        lines = [line.strip() for line in str(problem).splitlines() if "nltk.download(" in line]
        if not lines:
            raise ConfigError(f"environment {name.text!r}: textarena refuses it: {one_line(problem)}") from None
        resource = lines[0].partition("nltk.download(")[2].strip("')\x1b[0m ")
        raise ConfigError(
            f"environment {name.text!r} needs data of NLTK; python -m nltk.downloader {resource}"
        ) from None
    except Exception as problem:  # the boundary to the game's code
        raise ConfigError(f"environment {name.text!r}: textarena refuses it: {one_line(problem)}") from None
    tried = " or ".join(map(str, TRIED_PLAYERS)) if wanted is None else wanted
    raise ConfigError(f"environment {name.text!r} cannot be played by {tried}; set their number with players=NUMBER")


def accepts_players(package: ModuleType, game: Any, number: int, *, last: bool) -> bool:
    """Whether `number` players can play. Games refuse with an AssertionError, some with a ValueError; the `last` try
    raises the ValueError.

    A few games for several players accept one player, but cannot be played by one. So before the last try, one player
    is right only for a game whose state is a single player's.
    """
    try:
        game.reset(num_players=number, seed=0)
    except AssertionError:
        return False
    except ValueError:
        if last:
            raise
        return False
    return last or isinstance(unwrap_game(game).state, package.SinglePlayerState)

"""Real environments of other packages, through their adapters."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace as Thing
from urllib.parse import urlsplit

import pytest

from flowrl.environments import Action, EnvironmentFailed, EnvironmentName, EnvironmentRow, Episodes, Step
from flowrl.environments.adapters.gymnasium_env import grid_text
from flowrl.environments.environment_class import find_environment, import_package
from flowrl.errors import ConfigError
from tests.base.small_proxy import small_proxy

AGENT = Path(__file__).parent / "openrlhf_agent.py"
GRID = "gymnasium/MiniGrid-Empty-5x5-v0"
LAKE = "textarena/FrozenLake-v0"
NIM = "textarena/Nim-v0"
NUMBER = "gem/game:GuessTheNumber-v0-easy"
GSM8K = "skyrl_gym/gsm8k_multi_turn:task=arithmetic,max_value=9"
RLHF = f"openrlhf/{AGENT}:task=arithmetic,max_value=9"
EXAMPLE = RLHF.replace(AGENT.name, "openrlhf_example.py")
FIXED = (GRID, NIM)
"""Games that begin alike for every seed."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


def played(name: str, scenario: Callable[[Episodes], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with Episodes(name, step_s=20.0) as pool:
            await scenario(pool)

    asyncio.run(whole())


async def walk(pool: Episodes, seed: int, *texts: str) -> tuple[list[str], list[Step]]:
    """What the seats see first, and the steps until the texts or the episode are over. Seats act in order."""
    episode = await pool.reset(EnvironmentRow("own", {}, seed))
    steps: list[Step] = []
    for turn, text in enumerate(texts):
        steps.append(await episode.step(Action(text), turn % pool.seats))
        if steps[-1].over:
            break
    await episode.close()
    return [observation.text for observation in episode.observations], steps


def text(step: Step) -> str:
    (only,) = step.observations
    return only.text


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("gymnasium/MiniGrid-Empty-Random-5x5-v0", ("forward", "right", "forward", "left", "forward", "banana")),
        (LAKE, ("[right]", "[down]", "[right]", "over there", "[down]")),
        ("textarena/Blackjack-v0", ("[Hit]", "[Stand]", "[Hit]", "[Hit]", "[Stand]")),
        (NUMBER, (r"\boxed{5}", r"\boxed{3}", r"\boxed{8}", r"\boxed{2}")),
        (GSM8K, ("#### 5", "#### 9", "no idea", "#### 12")),
        (RLHF, ("3", "4", "5", "6")),
        (EXAMPLE, ("3", "4", "5", "6")),
        (GRID, ("forward", "right", "forward", "banana", "forward")),
        (NIM, ("[0 3]", "I take [1 4]", "[2 2]", "[2 1]", "[2 2]")),
    ],
)
def test_the_same_seed_and_actions_give_the_same_episode_alone_and_among_32(name: str, texts: tuple[str, ...]) -> None:
    async def scenario(pool: Episodes) -> None:
        alone = [await walk(pool, seed, *texts) for seed in range(4)]
        assert any(one != alone[0] for one in alone) or name in FIXED
        among = await asyncio.gather(*(walk(pool, seed, *texts) for seed in range(32)))
        assert among == alone * 8 if name in FIXED else among[:4] == alone

    played(name, scenario)


def test_a_grid_of_minigrid_is_walked_to_its_goal() -> None:
    async def scenario(pool: Episodes) -> None:
        (first,), steps = await walk(pool, 0, "forward", "I go forward", "1", "5 or 2", "banana", "FORWARD")
        assert first.startswith("A cell of the grid has two characters")
        assert "\n\n## ## ## ## ##\n## >> .. .. ##\n## .. .. .. ##\n## .. .. Gg ##\n## ## ## ## ##\n\n" in first
        assert first.endswith("0 left, 1 right, 2 forward, 3 pickup, 4 drop, 5 toggle, 6 done.")
        assert text(steps[0]) == (
            "Mission: get to the green goal square\n\n## ## ## ## ##\n## .. >> .. ##\n## .. .. .. ##\n## .. .. Gg ##\n"
            "## ## ## ## ##\n\nYou face right and carry nothing."
        )
        assert "## .. .. vv ##" in text(steps[2]) and "You face down" in text(steps[2])
        assert text(steps[4]).startswith("There is no action in this reply.")
        assert (steps[5].terminated, steps[5].metrics) == (True, {"malformed": 1.0})
        assert steps[5].rewards[0] == pytest.approx(1 - 0.9 * 5 / 100)

    played(GRID, scenario)


def test_a_key_and_a_locked_door_are_in_the_grid() -> None:
    async def scenario(pool: Episodes) -> None:
        (first,), _ = await walk(pool, 0)
        assert re.search(r" K[rgbpye] .* L[rgbpye] | L[rgbpye] .* K[rgbpye] ", first.partition("Mission")[2], re.DOTALL)

    played("gymnasium/MiniGrid-DoorKey-5x5-v0", scenario)


def test_each_thing_of_a_grid_has_its_cell() -> None:
    door = Thing(type="door", color="grey", is_open=False, is_locked=True)
    cells = [None, Thing(type="lava"), door, Thing(type="box", color="blue")]
    grid = Thing(get=lambda column, row: cells[column])
    env = Thing(width=4, height=1, grid=grid, agent_pos=(0, 0), agent_dir=3, mission="go", carrying=None)
    assert "\n^^ ~~ Le Bb\n" in grid_text(env)
    door.is_locked, env.carrying = False, Thing(type="key", color="green")
    assert "\n^^ ~~ De Bb\n" in grid_text(env) and grid_text(env).endswith("You face up and carry a green key.")
    door.is_open = True
    assert " Oe " in grid_text(env)


def test_a_lake_of_textarena_is_crossed_and_only_what_is_new_is_shown() -> None:
    async def scenario(pool: Episodes) -> None:
        assert pool.seats == 1
        (first,), steps = await walk(pool, 3, "[right]", "[down]", "[right]", "[right]", "[down]", "[down]")
        assert first.startswith("Welcome to Frozen Lake!") and first.count("Current Board") == 1
        assert text(steps[0]).startswith("You moved right to position (0, 1).\n\nCurrent Board:")
        assert "[right]\n" not in text(steps[0]) and text(steps[0]).count("Current Board") == 1
        last = steps[-1]
        assert (last.reward, last.terminated) == (1.0, True)
        assert last.metrics == {"turns": 6.0, "invalid_move": 0.0}

    played(LAKE, scenario)


def test_an_invalid_move_of_a_single_player_is_told_once_and_ends_the_game_twice() -> None:
    async def scenario(pool: Episodes) -> None:
        _, (told, ended) = await walk(pool, 3, "jump", "jump")
        assert "You attempted an invalid move" in text(told) and not told.over
        assert ended.terminated and ended.metrics["invalid_move"] == 1.0

    played(LAKE, scenario)


def test_two_seats_play_nim_and_each_sees_what_the_other_did() -> None:
    async def scenario(pool: Episodes) -> None:
        assert pool.seats == 2
        first, steps = await walk(pool, 0, "[0 3]", "I take [1 4]", "[2 5]")
        assert first[0].startswith("Welcome to Nim, Player 0!") and first[1] == ""
        mine, theirs = steps[0].observations
        assert mine.text == "" and theirs.text.startswith("Welcome to Nim, Player 1!")
        assert "[Player 0] [0 3]" in theirs.text and theirs.text.endswith("pile 0: 0\n  pile 1: 4\n  pile 2: 5")
        answer = steps[1].observations[0].text
        assert "[Player 1] I take [1 4]" in answer and "[Player 0]" not in answer and "Welcome" not in answer
        assert (steps[0].rewards, steps[2].rewards) == ((0.0, 0.0), (1.0, -1.0))
        assert steps[2].terminated and steps[2].metrics == {"turns": 3.0, "invalid_move": 0.0}
        _, (lost,) = await walk(pool, 0, "[7 1]", "[0 1]")
        assert (lost.rewards, lost.terminated, lost.metrics["invalid_move"]) == ((-1.0, 1.0), True, 1.0)

    played(NIM, scenario)


def test_two_games_of_one_seed_step_by_step_do_not_disturb_each_other() -> None:
    """Blackjack draws from the module `random`."""
    texts = ("[Hit]", "[Stand]", "[Hit]", "[Stand]")

    async def scenario(pool: Episodes) -> None:
        expected = await walk(pool, 5, *texts)
        both = [await pool.reset(EnvironmentRow("own", {}, 5)) for _ in range(2)]
        found = [[await one.step(Action(said)) for one in both] for said in texts]
        assert [first for first, _ in found] == [second for _, second in found] == expected[1]
        for one in both:
            await one.close()

    played("textarena/Blackjack-v0", scenario)


def test_seat_0_is_the_player_who_begins() -> None:
    """In Kuhn poker that is player 1."""

    async def scenario(pool: Episodes) -> None:
        first, (bet, fold) = await walk(pool, 0, "[bet]", "[nonsense]")
        assert first[0].startswith("You are Player 1") and first[1] == ""
        assert bet.observations[0].text == "" and bet.observations[1].text.startswith("You are Player 0")
        assert (fold.rewards, fold.terminated) == ((1.0, -1.0), True)

    played("textarena/KuhnPoker-v0", scenario)


@pytest.mark.parametrize("game", ["QuantumTicTacToe-v0", "GermanWhist-v0"])
def test_a_game_that_accepts_one_player_or_refuses_it_by_an_error_is_for_two(game: str) -> None:
    async def scenario(pool: Episodes) -> None:
        assert pool.seats == 2

    played(f"textarena/{game}", scenario)


def test_a_game_for_more_players_is_told_how_many() -> None:
    async def scenario(pool: Episodes) -> None:
        assert pool.seats == 3
        first, _ = await walk(pool, 0)
        assert first[0] and first[1:] == ["", ""]

    played("textarena/ThreePlayerTicTacToe-v0:players=3", scenario)


def test_a_number_is_guessed_in_gem() -> None:
    async def scenario(pool: Episodes) -> None:
        (first,), steps = await walk(pool, 3, r"\boxed{5}", "I think three", r"\boxed{3}")
        assert "between 1 and 10" in first and first.endswith("Enter your next guess.")
        assert text(steps[0]).startswith("At turn 1, you guessed 5, and the target number is")
        assert text(steps[0]).endswith("\nEnter your next guess.")
        assert (steps[1].terminated, steps[1].reward) == (True, -0.1)
        for guess in range(1, 5):
            _, (step, *_) = await walk(pool, 3, rf"\boxed{{{guess}}}")
            assert step.over == (step.reward == 1.0)

    played(NUMBER, scenario)


def test_the_last_turn_of_gem_truncates_and_options_are_the_packages() -> None:
    async def scenario(pool: Episodes) -> None:
        (first,), (last,) = await walk(pool, 3, r"\boxed{9}")
        assert "within 1 turns" in first and (last.truncated, last.terminated) == (True, False)

    played(f"{NUMBER}:max_turns=1", scenario)


def test_a_question_is_answered_in_several_turns_of_skyrl() -> None:
    async def scenario(pool: Episodes) -> None:
        (question,), _ = await walk(pool, 3)
        right = str(eval(question.rstrip("=")))
        _, steps = await walk(pool, 3, "no idea", "#### 99", f"so #### {right}")
        assert text(steps[0]).startswith("Please provide your step-by-step reasoning")
        assert [step.reward for step in steps] == pytest.approx([0.0, 0.2 / 3, 1.0])
        assert steps[2].terminated and steps[2].metrics == {"steps": 3.0}
        _, steps = await walk(pool, 3, "a", "b", "c", "d")
        assert len(steps) == 3 and steps[2].terminated

    played(f"{GSM8K},max_turns=3", scenario)


def test_the_answer_of_gsm8ks_own_rows_is_what_follows_its_mark(tmp_path: Path) -> None:
    rows = [f'{{"question": "{n} and 1000?", "answer": "I add. #### 1,{n:03}"}}' for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))

    async def scenario(pool: Episodes) -> None:
        (question,), _ = await walk(pool, 2)
        _, (step,) = await walk(pool, 2, f"#### 1,{int(question.split()[0]):03}")
        assert (step.reward, step.terminated) == (1.0, True)

    played(f"skyrl_gym/gsm8k:task={tmp_path}/rows.jsonl,prompt=question", scenario)


def test_an_agents_file_of_openrlhf_is_played_without_its_package() -> None:
    async def scenario(pool: Episodes) -> None:
        (first,), steps = await walk(pool, 3, "x")
        question, tries = first.rstrip(")").split(" (")
        assert text(steps[0]) == f"No, and {len(first)} characters were said."
        assert (steps[0].reward, steps[0].max_tokens, steps[0].stop) == (0.0, 7, ("\n",))
        assert steps[0].metrics == {"score": 0.0, "left": float(tries.split()[0]) - 1}
        _, (wrong, right) = await walk(pool, 3, "x", str(eval(question.rstrip("="))))
        assert (wrong.over, right.terminated, right.reward, right.metrics["score"]) == (False, True, 0.5, 1.0)
        with pytest.raises(EnvironmentFailed, match="environment_feedback, done") as failed:
            await walk(pool, 3, "nothing")
        assert failed.value.cause == "env_malformed"

    played(RLHF, scenario)


def test_an_agent_that_gives_tensors_is_played_and_its_images_are_refused() -> None:
    async def scenario(pool: Episodes) -> None:
        (question,), steps = await walk(pool, 3, "x", "x", "x", "x")
        assert question.endswith("=") and text(steps[0]) == f"[ON] after {question}</s>"
        assert text(steps[-1]) == "[END]</s>" and steps[-1].terminated and len(steps) >= 2
        assert steps[0].metrics == {"score": 0.0, "dummy_scores": 0.0} and steps[-1].reward in (0.0, 1.0)
        assert (steps[0].max_tokens, steps[0].stop) == (None, ())
        with pytest.raises(EnvironmentFailed, match="images are not supported") as failed:
            await walk(pool, 3, "a screenshot")
        assert failed.value.cause == "env_malformed"

    played(EXAMPLE, scenario)


# OpenEnv


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts a server of a game of openenv_server.py, for so many sessions. Returns the environment's name."""
    started: list[subprocess.Popen[str]] = []

    def start(game: str, sessions: int = 40) -> str:
        script = Path(__file__).parent / "openenv_server.py"
        command = [sys.executable, str(script), game, str(sessions)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        return f"openenv/http://127.0.0.1:{int(started[-1].stdout.readline())}"

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_server_of_openenv_is_played_and_repeats_alone_and_among_32(serve: Callable[..., str]) -> None:
    texts = [str(number) for number in range(8)]

    async def scenario(pool: Episodes) -> None:
        assert pool.zygote_pid is None
        (first,), steps = await walk(pool, 3, *texts)
        assert first == "A number below 4." and text(steps[0]) in ("0 is too low.", "0 is right.")
        assert (steps[-1].reward, steps[-1].terminated) == (1.0, True)
        alone = [await walk(pool, seed, *texts) for seed in range(4)]
        assert any(one != alone[0] for one in alone)
        assert (await asyncio.gather(*(walk(pool, seed, *texts) for seed in range(32))))[:4] == alone

    played(f"{serve('guess')}:size=4", scenario)


def test_a_server_of_openenv_behind_a_proxy(monkeypatch: pytest.MonkeyPatch, serve: Callable[..., str]) -> None:
    name = serve("guess")
    port = urlsplit(name.removeprefix("openenv/")).port or 0

    def first(host: str) -> str:
        async def scenario() -> str:
            async with Episodes(f"openenv/http://{host}:{port}:size=4", step_s=20.0) as pool:
                (text,), _ = await walk(pool, 3)
                return text

        return asyncio.run(scenario())

    with small_proxy({"game.example": port}) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert first("127.0.0.1") == "A number below 4." and proxy.asked == []
        assert first("game.example") == "A number below 4." and set(proxy.asked) == {"HTTP game.example"}


def test_an_action_of_several_fields_is_a_json_object(serve: Callable[..., str]) -> None:
    async def scenario(pool: Episodes) -> None:
        replies = ("take one", '{"pile": 0, "take": "x"}', '{"pile": 0, "take": 1}', "[1]", '{"pile": 1, "take": 2}')
        (first,), steps = await walk(pool, 0, *replies)
        assert first.startswith('{"piles": [1, 2]}\n\nAnswer with a JSON object. Its schema: {') and '"pile"' in first
        assert text(steps[0]) == "This reply is no JSON object. Answer with one that has the schema of an action."
        assert text(steps[1]).startswith("Invalid message: take: Input should be a valid integer")
        assert text(steps[2]) == '{"piles": [0, 2]}'
        assert (steps[4].reward, steps[4].terminated, steps[4].metrics) == (1.0, True, {"malformed": 3.0})
        _, steps = await walk(pool, 0, "a", "b", "c", "d")
        assert [step.truncated for step in steps] == [False, False, True]

    played(serve("take"), scenario)


@pytest.mark.parametrize(
    ("reply", "cause", "says"),
    [
        ("raise", "env_raised", "as ordered"),
        ("die", "env_unreachable", "ended the session|Cannot|lost"),
        ("no reward", "env_malformed", "ended the episode without any reward"),
    ],
)
def test_what_the_server_does_wrong_has_its_cause(serve: Callable[..., str], reply: str, cause: str, says: str) -> None:
    async def scenario(pool: Episodes) -> None:
        episode = await pool.reset(EnvironmentRow("own"))
        with pytest.raises(EnvironmentFailed, match=says) as failed:
            await episode.step(Action(reply))
        assert failed.value.cause == cause
        await episode.close()

    played(serve("guess"), scenario)


def test_a_server_that_is_full_or_not_there_cannot_be_reached(serve: Callable[..., str]) -> None:
    async def scenario(pool: Episodes) -> None:
        first = await pool.reset(EnvironmentRow("own"))
        with pytest.raises(EnvironmentFailed, match="no session left") as failed:
            await pool.reset(EnvironmentRow("own"))
        assert failed.value.cause == "env_unreachable"
        await first.close()

    async def nobody(pool: Episodes) -> None:
        with pytest.raises(EnvironmentFailed) as failed:
            await pool.reset(EnvironmentRow("own"))
        assert failed.value.cause == "env_unreachable"

    played(serve("guess", 1), scenario)
    played("openenv/http://127.0.0.1:9", nobody)


# Mistakes of the user


async def nothing(pool: Episodes) -> None:
    raise AssertionError


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gymnasium/MiniGrid-Emty-5x5-v0", "Environment `MiniGrid-Emty-5x5` doesn't exist"),
        ("gymnasium/MiniGrid-Empty-5x5-v0:actions=a/b", r"actions has 2 name\(s\) and the environment 7 actions"),
        ("textarena/FrozenLak-v0", "textarena has no game 'FrozenLak-v0'; did you mean FrozenLake-v0"),
        ("textarena/FrozenLake-v0:bla=2", "textarena refuses it: .*unexpected keyword argument 'bla'"),
        ("textarena/Nim-v0:players=1", "cannot be played by 1; set their number with players=NUMBER"),
        ("textarena/Hangman-v0", "needs data of NLTK; python -m nltk.downloader words"),
        (
            "gem/game:GuessTheNumber",
            "gem has no environment 'game:GuessTheNumber'; did you mean game:GuessTheNumber-v0",
        ),
        ("skyrl_gym/gsm8k_multi_turn", "has no questions; write :task=arithmetic, or task=FILE.jsonl"),
        ("skyrl_gym/gsm9k:task=arithmetic", "skyrl_gym has no environment 'gsm9k'; did you mean gsm8k"),
        ("skyrl_gym/gsm8k_multi_turn:task=arithmetic,max_turns=0", "max_turns is 0; it has to be at least 1"),
        ("skyrl_gym/gsm8k_multi_turn:task=arithmetic,max=3", "task 'arithmetic:max=3' has no option 'max'"),
        ("skyrl_gym/search:task=arithmetic", "cannot be made: "),
        (f"openrlhf/{AGENT}", "has no questions; write :task=arithmetic"),
        (f"openrlhf/{AGENT.parent}/environment_cases.py:task=arithmetic", "has no agent; define class AgentInstance"),
        ("openrlhf/nowhere.py:task=arithmetic", "file nowhere.py does not exist"),
        ("openenv/localhost:8000", "has no address; write openenv/http://HOST:PORT"),
        ("openenv/http://localhost:8000:seed=1", "has the option seed, which its rows decide"),
    ],
)
def test_a_users_mistake_gets_one_message_before_anything_starts(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where NLTK's data would be
    with pytest.raises(ConfigError, match=says):
        played(name, nothing)


@pytest.mark.parametrize(
    ("name", "module", "package", "remedy"),
    [
        (GRID, "minigrid", "minigrid", "flowrl setup environments"),
        (GRID, "pygame", "pygame", "flowrl setup environments"),
        (GRID, "gymnasium", "gymnasium", "pip install gymnasium"),
        (LAKE, "textarena", "textarena", "flowrl setup environments"),
        (NUMBER, "gem", "gem-llm", "flowrl setup environments"),
        (GSM8K, "skyrl_gym", "skyrl-gym", "flowrl setup environments"),
    ],
)
def test_a_missing_package_is_named(
    name: str, module: str, package: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known in [known for known in sys.modules if known.partition(".")[0] in (module, "minigrid")]:
        monkeypatch.delitem(sys.modules, known)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"needs the package {package}; {remedy}$"):
        find_environment(name)


def test_a_file_that_hides_what_a_package_imports_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's directory comes first among those that modules are looked for in."""
    (tmp_path / "played").mkdir()
    (tmp_path / "played" / "__init__.py").write_text("from hidden_library.functions import schema\n")
    (tmp_path / "hidden_library.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    told = rf"{tmp_path}/hidden_library\.py hides the package hidden_library, which verifiers imports; rename it, or"
    with pytest.raises(ConfigError, match=told):
        import_package(EnvironmentName("gem/x"), "played", distribution="verifiers")


@pytest.mark.parametrize(
    ("name", "adapter", "place", "options"),
    [
        (NUMBER, "gem", "game:GuessTheNumber-v0-easy", {}),
        (f"{NUMBER}:max_turns=6", "gem", "game:GuessTheNumber-v0-easy", {"max_turns": 6}),
        ("openenv/http://a:80/b:size=4,kind=c:d", "openenv", "http://a:80/b", {"size": 4, "kind": "c:d"}),
        ("openrlhf/agents/a.py:task=b.jsonl", "openrlhf", "agents/a.py", {"task": "b.jsonl"}),
        ("openrlhf/own.py:Class:size=4", "", "openrlhf/own.py:Class", {"size": 4}),
        ("gem/own.py:Class", "", "gem/own.py:Class", {}),
    ],
)
def test_names_with_colons_and_files_are_told_apart(
    name: str, adapter: str, place: str, options: dict[str, object]
) -> None:
    found = EnvironmentName(name)
    assert (found.adapter, found.place, found.options) == (adapter, place, options)

"""Groups that other samples ask for: tickets are kept for them, and no offer is lost when a run is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import GraphError, Stalled
from flowrl.testing import run_graph

ASKING = Path(__file__).parent / "graphs_resumed" / "asking.py"
ADMITTED = "SELECT group_id FROM tickets ORDER BY ticket"


@pytest.mark.parametrize("config", [{}, {"every": 3}, {"staleness": 2, "group_size": 3}, {"groups_per_step": 2}])
def test_every_group_gets_the_tickets_that_its_samples_ask_for(tmp_path: Path, config: dict[str, Any]) -> None:
    ran = run_graph(ASKING, tmp_path / "run", config, steps=8)
    assert ran.audit().ok, str(ran.audit())
    assert ran.steps == list(range(1, 9))
    (asked,) = ran.rows("SELECT COUNT(*) FROM tickets WHERE asked_by IS NOT NULL")[0]
    assert asked >= 8
    assert ran.rows("SELECT DISTINCT asks FROM tickets ORDER BY 1") == [(0,), (1,)]


def test_without_kept_tickets_the_first_groups_take_all_and_the_deadlock_is_proven_with_its_place(
    tmp_path: Path,
) -> None:
    ran = run_graph(ASKING, tmp_path / "run", {"asks": 0}, steps=8, must_succeed=False)
    assert isinstance(ran.error, Stalled), ran.error
    text = str(ran.error)
    assert "ticket of prompts.prompts" in text
    assert "reply of arena.ask" in text


def test_a_node_that_waits_for_its_own_event_is_part_of_a_proven_deadlock(tmp_path: Path) -> None:
    ran = run_graph(ASKING, tmp_path / "run", {"asks": 0, "groups_per_step": 8}, steps=8, must_succeed=False)
    assert isinstance(ran.error, Stalled), ran.error


def test_too_few_tickets_are_refused_before_the_run(tmp_path: Path) -> None:
    wanted = r"may ask for 2 further groups .* 3 of the 4 tickets can be out .* needs 3.*raise staleness by 1"
    with pytest.raises(GraphError, match=wanted):
        run_graph(ASKING, tmp_path / "run", {"staleness": 0}, steps=2)


@pytest.mark.parametrize("state", ["before", "after"])
@pytest.mark.parametrize("every", [1, 2])
def test_an_offer_that_waits_for_its_ticket_is_not_lost_on_resume(tmp_path: Path, state: str, every: int) -> None:
    config = {"state": state, "every": every}
    run_graph(ASKING, tmp_path / "run", config, steps=5, save_every=1)
    ran = run_graph(ASKING, tmp_path / "run", config, steps=10, save_every=1, resume=True)
    assert ran.audit().ok, str(ran.audit())
    assert ran.steps == list(range(6, 11))
    numbers = [int(name[5:]) for (name,) in ran.rows(ADMITTED) if name.startswith("group")]
    assert numbers == list(range(len(numbers)))


def test_a_source_that_asks_for_more_than_it_declares_is_named(tmp_path: Path) -> None:
    file = tmp_path / "more.py"
    text = ASKING.read_text().replace("self.members(number), asks=self.asks", "self.members(number), asks=2")
    file.write_text(text)
    ran = run_graph(file, tmp_path / "run", {}, steps=2, must_succeed=False)
    assert "admitted a group with asks=2, but declares 1" in str(ran.error)


def test_a_sample_that_asks_for_more_groups_than_are_kept_for_it_is_named(tmp_path: Path) -> None:
    file = tmp_path / "twice.py"
    again = 'self.members(0, of=f"{name} again"), asked_by=by'
    text = ASKING.read_text().replace(
        "        await self.answers[name].wait()\n",
        f"        await self.prompts.admit({again})\n        await self.answers[name].wait()\n".replace("=by", "=name"),
    )
    file.write_text(text)
    ran = run_graph(file, tmp_path / "run", {}, steps=2, must_succeed=False)
    assert "needs 1 of the tickets kept for that sample, and 0 are left" in str(ran.error)

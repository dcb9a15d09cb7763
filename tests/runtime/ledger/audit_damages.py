"""Falsified ledgers: what was done to each, and what the audit has to say of it.

Of the runs in `small_run`. Each entry: statements that change one row each; the kind of the violation; part of
its text.
"""

from __future__ import annotations

# Each damage with what the audit has to say of it: (kind, part of its text). Samples g0/0 and g0/1 are
# trained at step 1; all of group 4 is filtered or failed.
A = "UPDATE samples SET {} WHERE sample_id = 'g0/0'"
FILTERED = "UPDATE samples SET {} WHERE sample_id = 'g4/0'"
USE = "UPDATE uses SET {} WHERE sample_id = 'g0/0'"
TICKET = "UPDATE tickets SET {} WHERE ticket = 0"
LAST = "UPDATE tickets SET {} WHERE ticket = (SELECT MAX(ticket) FROM tickets)"
AGAIN = (
    "INSERT INTO reuses SELECT sample_id, trainer, {version}, {step}, {number}, {tokens}, {masked}, {oldest} FROM uses"
    " WHERE sample_id = '{sample}'"
)
"""A reuse of a sample; by default, but for the cap of the run, a sound one."""


def again(sample: str = "g0/0", **values: object) -> str:
    sound = {"version": 2, "step": 3, "number": 1, "tokens": "tokens", "masked": 0, "oldest": "oldest_version"}
    return AGAIN.format(sample=sample, **{**sound, **values})


VERSION_2 = "oldest_version = 2, newest_version = 2"
DAMAGES = {
    "unknown state": ([A.format("state = 'lost'")], "state", "unknown state 'lost'"),
    "no reason": ([FILTERED.format("reason = NULL")], "state", "sample g4/0 is filtered without a reason"),
    "trained for a reason": ([A.format("reason = 'x'")], "state", "g0/0 is trained, but has a reason, 'x'"),
    "filtered and trained": (
        [FILTERED.format("step = 2, trained_version = 1")],
        "state",
        "sample g4/0 is filtered, but is recorded as trained at step 2",
    ),
    "trained at no step": ([A.format("step = NULL")], "state", "sample g0/0 is trained, but at no step"),
    "trained and never generated": (
        [A.format("generated_s = NULL")],
        "state",
        "g0/0 is trained, but was never generated",
    ),
    "in flight after the end": (
        [FILTERED.format("state = 'in_flight', reason = NULL")],
        "state",
        "sample g4/0 is in flight, but the run ended normally",
    ),
    "below 0": ([A.format("redone_tokens = -7")], "tokens", "sample g0/0 has a count below 0: 5 tokens in its prompt"),
    "a token more than generated": (
        [A.format("trained_tokens = trained_tokens + 1"), USE.format("tokens = tokens + 1")],
        "tokens",
        "sample g0/0: ",
    ),
    "tokens of a filtered sample": (
        [FILTERED.format("trained_tokens = 1")],
        "tokens",
        "sample g4/0 is filtered, but 1 of its tokens count as trained",
    ),
    "more masked than generated": (
        [FILTERED.format("masked_tokens = response_tokens + 1")],
        "tokens",
        "sample g4/0 is filtered with 0 stale and ",
    ),
    "stale in part": (
        [FILTERED.format("reason = 'stale', state = 'dropped', stale_tokens = 0")],
        "tokens",
        "sample g4/0 is dropped as stale, but 0 of its ",
    ),
    "stale where nothing is masked": (
        [A.format("response_tokens = response_tokens + 5, stale_tokens = 5"), USE.format("stale_tokens = 5")],
        "tokens",
        "sample g0/0 has 5 stale tokens, but no incarnation of the run masked any",
    ),
    "the sum does not add up": (
        [A.format("trained_tokens = trained_tokens - 1"), USE.format("tokens = tokens - 1")],
        "tokens",
        "policy tokens generated, but ",
    ),
    "trained twice": (
        ["INSERT INTO uses SELECT sample_id, trainer, 1, 2, tokens, 0, 0, 0 FROM uses WHERE sample_id = 'g0/0'"],
        "uses",
        "sample g0/0 was used 2 times by trainer",
    ),
    "used again by a stranger": (
        ["INSERT INTO reuses VALUES ('x/0', 'trainer', 2, 3, 1, 3, 0, 0)"],
        "reuses",
        "trainer used sample x/0 again, which was never admitted",
    ),
    "used again at no step": (
        [again(step=99)],
        "reuses",
        "trainer used sample g0/0 again at step 99, which it has not finished",
    ),
    "used again before": (
        [again("g6/0", step=1)],
        "reuses",
        "trainer used sample g6/0 again at step 1, but never before",
    ),
    "used again in an open group": (
        [again(), "UPDATE uses SET step = 4, version = 3 WHERE sample_id = 'g0/2'"],
        "reuses",
        "trainer used sample g0/0 again at step 3, but its group was not finished then",
    ),
    "a reuse left out": (
        [again(number=2)],
        "reuses",
        "used sample g0/0 again at step 3 after 2 uses by its own count, but after 1 by the ledger's",
    ),
    "a reuse too many": ([again()], "reuses", "trainer used sample g0/0 2 times by step 3, but the run allows 1"),
    "a reuse of more tokens": (
        [again(tokens=99)],
        "reuses",
        "trainer used sample g0/0 again at step 3 with 99 tokens in the loss and 0 masked, of ",
    ),
    "a reuse of a filtered sample": (
        ["INSERT INTO reuses VALUES ('g4/0', 'trainer', 2, 3, 1, 1, 0, 0)"],
        "reuses",
        "trainer used sample g4/0 again at step 3, but the sample is filtered",
    ),
    "a reuse that was fed nothing": (
        [again()],
        "reuses",
        "trainer used sample g0/0 again and was fed 0 policy tokens of it at step 3, but ",
    ),
    "a reuse of another version": (
        [again(version=1)],
        "versions",
        "sample g0/0: step 3 updates version 1, not the one before it, in a reuse",
    ),
    "a reuse of newer tokens": (
        [again(oldest=2)],
        "versions",
        "sample g0/0: the oldest token of a reuse is of version 2, but its tokens are of ",
    ),
    "a reuse too old": (
        [again(), "UPDATE incarnations SET max_uses = 2, max_reused_age = 1"],
        "bound",
        "trained version 2 of trainer again (age 2), but a reuse is bound by 1",
    ),
    "a stranger": (
        ["INSERT INTO uses VALUES ('x/0', 'trainer', 0, 1, 3, 0, 0, 0)"],
        "uses",
        "trainer used sample x/0, which was never admitted",
    ),
    "a step that there was not": (
        ["DELETE FROM steps WHERE step = 1"],
        "uses",
        "trainer used sample g0/0 at step 1, which it has not finished",
    ),
    "used though filtered": (
        ["INSERT INTO uses VALUES ('g4/0', 'trainer', 1, 2, 3, 0, 0, 1)"],
        "uses",
        "trainer used sample g4/0 at step 2, but the sample is filtered",
    ),
    "no use": (["DELETE FROM uses WHERE sample_id = 'g0/0'"], "uses", "sample g0/0 is trained at step 1 with "),
    "another count of tokens": ([USE.format("tokens = tokens - 1")], "uses", "but no use by a trainer records this"),
    "another age": ([USE.format("oldest_version = NULL")], "uses", "but no use by a trainer records this"),
    "more used than generated": (
        [USE.format("masked_tokens = 100")],
        "uses",
        "trainer used sample g0/0 with ",
    ),
    "another version updated": ([A.format("trained_version = 3")], "versions", "g0/0: step 1 updates version 3"),
    "another version used": ([USE.format("version = 3")], "versions", "g0/0: step 1 updates version 3"),
    "tokens older than admission": (
        [A.format("born_version = 1")],
        "versions",
        "sample g0/0 was admitted when version 1 was held everywhere, but has tokens of version 0",
    ),
    "admitted later than its ticket": (
        [A.format("born_version = 1")],
        "versions",
        "sample g0/0 was admitted when version 1 was held everywhere, but its ticket says 0",
    ),
    "tokens of the future": (
        [A.format("newest_version = 5")],
        "versions",
        "sample g0/0: versions out of order: tokens of 0 to 5, trained ones from 0, updating 0",
    ),
    "staleness hidden": (
        [A.format("oldest_trained_version = 1"), USE.format("oldest_version = 1")],
        "versions",
        "sample g0/0 was trained whole and its oldest token is of version 0, but the oldest trained version is 1",
    ),
    "tokens of no version": (
        [A.format("oldest_trained_version = NULL"), USE.format("oldest_version = NULL")],
        "versions",
        "trained tokens of no version",
    ),
    "beyond the bound": (
        ["UPDATE uses SET oldest_version = -9 WHERE sample_id = 'g0/0'"],
        "bound",
        "sample g0/0: a token of version -9 trained version 0 of trainer (staleness 9), but the bound is 1",
    ),
    "two samples of one number": (
        ["UPDATE samples SET member = 0 WHERE sample_id = 'g0/1'"],
        "groups",
        "group g0 has two samples with the number 0",
    ),
    "a member that has gone": (
        ["DELETE FROM samples WHERE sample_id = 'g4/0'"],
        "groups",
        "group g4 was admitted with 2 samples, but the graph's groups have 3",
    ),
    "an epoch below 0": ([A.format("epoch = -1")], "groups", "g0/0 has the number 0 in its group, in epoch -1"),
    "a group too many in a batch": (
        ["INSERT INTO uses VALUES ('g4/0', 'trainer', 0, 1, 0, 0, 0, NULL)"],
        "groups",
        "step 1 trained samples of 3 groups, but a batch has 2 at most",
    ),
    "a gap": ([LAST.format("ticket = ticket + 500")], "tickets", "14 tickets were taken, numbered 0 to 513"),
    "a state of a ticket": ([TICKET.format("state = 'lost'")], "tickets", "ticket 0 has unknown state 'lost'"),
    "nothing held": ([TICKET.format("held = 'x'")], "tickets", "ticket 0 does not record which versions were held"),
    "a group without a ticket": (
        ["DELETE FROM tickets WHERE group_id = 'g0'"],
        "tickets",
        "group g0 has samples, but never took a ticket",
    ),
    "a ticket without a group": (
        ["INSERT INTO tickets VALUES (99, 'x', 'dropped', NULL, '{}', 0, NULL)"],
        "tickets",
        "ticket 99 was taken for group x, which has no samples",
    ),
    "a group that a later sample asked for": (
        ["UPDATE tickets SET asked_by = 'g2/0' WHERE ticket = 1", "UPDATE tickets SET asks = 1 WHERE ticket = 2"],
        "tickets",
        "group g1 was asked for by sample g2/0, which was not admitted before it",
    ),
    "a sample that asks too often": (
        [
            "UPDATE tickets SET asked_by = 'g0/0' WHERE ticket = 1",
            "UPDATE tickets SET asked_by = 'g0/0' WHERE ticket = 2",
            "UPDATE tickets SET asks = 1 WHERE ticket = 0",
        ],
        "tickets",
        "sample g0/0 asked for 2 groups, but tickets were kept for 1",
    ),
    "fewer than no kept tickets": (
        [TICKET.format("asks = -1")],
        "tickets",
        "ticket 0 keeps -1 tickets for each sample of its group",
    ),
    "a dropped group that trained": (
        [TICKET.format("state = 'dropped'")],
        "tickets",
        "ticket 0 is dropped, but sample g0/0 of its group is trained",
    ),
    "a ticket that never came back": (
        ["UPDATE tickets SET state = 'open' WHERE group_id = 'g4'"],
        "tickets",
        "is open, but nothing of its group g4 is in flight",
    ),
    "a filtered group that trained": (
        ["UPDATE tickets SET state = 'trained', step = 2 WHERE group_id = 'g4'"],
        "tickets",
        "is trained, but no sample of its group g4 is",
    ),
    "a ticket of no step": ([TICKET.format("step = NULL")], "tickets", "ticket 0 is trained, and came back with step"),
    "a ticket of no finished step": (
        [TICKET.format("step = 77")],
        "tickets",
        "ticket 0 came back with step 77, which no trainer has finished",
    ),
    "a ticket of another step": (
        [TICKET.format("step = 4")],
        "tickets",
        "ticket 0 came back with step 4, but its group was trained last at step 1",
    ),
    "a step left out": (["DELETE FROM steps WHERE step = 2"], "steps", "trainer has finished 5 steps, numbered 1 to 6"),
    "a step of no incarnation": (
        ["UPDATE steps SET incarnation = 4 WHERE step = 2"],
        "steps",
        "trainer finished step 2 in unknown incarnation 4",
    ),
    "a step of a stranger": (
        ["UPDATE steps SET trainer = 'x' WHERE step = 2"],
        "steps",
        "x finished step 2, but it is no trainer of the graph",
    ),
    "an incarnation left out": (
        ["UPDATE incarnations SET number = 3"],
        "steps",
        "1 incarnations have begun, and the last has the number 3",
    ),
    "an evaluation at another time": (
        ["UPDATE evaluations SET phase = 'x' WHERE phase = 'before' AND prompt_id = 'q3'"],
        "evaluations",
        "an evaluation x training, but there was no such evaluation",
    ),
    "two versions in one evaluation": (
        ["UPDATE evaluations SET newest_version = 1 WHERE phase = 'before' AND prompt_id = 'q3'"],
        "evaluations",
        "the evaluation before training at step 0 ran on versions 0 to 1",
    ),
    "an evaluation of another version": (
        [f"UPDATE evaluations SET {VERSION_2} WHERE phase = 'after' AND prompt_id = 'q{i}'" for i in range(8)],
        "evaluations",
        "the evaluation after training at step 6 ran on versions 2 to 2",
    ),
    "an answer counted twice": (
        ["INSERT INTO evaluations SELECT * FROM evaluations WHERE phase = 'after' AND prompt_id = 'q1'"],
        "evaluations",
        "the evaluation after training at step 6 has answer 0 to prompt q1 of task '' 2 times",
    ),
    "an answer of less than nothing": (
        ["UPDATE evaluations SET response_tokens = -1 WHERE phase = 'after' AND prompt_id = 'q1'"],
        "evaluations",
        "answer 0 to prompt q1 has -1 tokens",
    ),
}
# Group 0: g0/0 failed, g0/1 was used by the actor alone, g0/2 by both.
DAMAGES_OF_TWO = {
    "left out, but never admitted": (
        ["INSERT INTO losses VALUES ('x', 'critic', 'filtered', 'y')"],
        "losses",
        "critic left out sample x, which was never admitted",
    ),
    "left out twice": (
        ["INSERT INTO losses VALUES ('g0/1', 'critic', 'filtered', 'for_the_critic')"],
        "losses",
        "critic left out sample g0/1 2 times",
    ),
    "left out and used": (
        ["INSERT INTO losses VALUES ('g0/2', 'critic', 'filtered', 'y')"],
        "losses",
        "critic both used sample g0/2 and left it out",
    ),
    "left out in a state": (
        ["UPDATE losses SET state = 'lost' WHERE sample_id = 'g0/1'"],
        "losses",
        "critic left out sample g0/1 with unknown state 'lost'",
    ),
    "lost by nobody": (
        ["UPDATE samples SET reason = 'x' WHERE sample_id = 'g0/0'"],
        "losses",
        "sample g0/0 is failed (x), but no trainer left it out with that state and reason",
    ),
    "of no fate": (
        ["DELETE FROM losses WHERE sample_id = 'g0/1'"],
        "losses",
        "sample g0/1 is trained, but critic neither used it nor left it out",
    ),
    "another clock": (
        ["UPDATE uses SET oldest_version = 1 WHERE sample_id = 'g5/2' AND trainer = 'critic'"],
        "versions",
        "sample g5/2: its age at critic counts from version 1, but 2 of its weights was held everywhere at admission",
    ),
    "a second trainer beyond the bound": (
        ["UPDATE uses SET oldest_version = 0 WHERE sample_id = 'g5/2' AND trainer = 'critic'"],
        "bound",
        "sample g5/2: a token of version 0 trained version 2 of critic (staleness 2), but the bound is 1",
    ),
    "a second trainer with more than was generated": (
        ["UPDATE uses SET tokens = 100 WHERE sample_id = 'g5/2' AND trainer = 'critic'"],
        "uses",
        "critic used sample g5/2 with 100 tokens trained, 2 stale and 0 masked, of 4 generated",
    ),
}
# Two samples are derived from g0/0, under the label branch.
BRANCH = "WHERE sample_id = 'g0/0/branch.0'"
DAMAGES_OF_DERIVED = {
    "derived, but never admitted": (
        [f"DELETE FROM samples {BRANCH}"],
        "derived",
        "sample g0/0/branch.0 was derived from g0/0, but never admitted",
    ),
    "derived from a sample of another group": (
        [f"UPDATE derived SET parent_id = 'g1/0' {BRANCH}"],
        "derived",
        "sample g0/0/branch.0 of group g0 was derived from g1/0, which is no sample of this group",
    ),
    "derived with a number of an admitted sample": (
        [f"UPDATE samples SET member = 0 {BRANCH}"],
        "derived",
        "sample g0/0/branch.0 has the number 0 in its group, and g0/0, from which it was derived, the number 0",
    ),
    "derived under another label": (
        [f"UPDATE derived SET label = 'twig' {BRANCH}"],
        "derived",
        "sample g0/0/branch.0 is number 0 of those derived from g0/0 under twig, so its id has to be g0/0/twig.0",
    ),
    "derived with a gap": (
        [f"DELETE FROM derived {BRANCH}"],
        "derived",
        "1 samples were derived from g0/0 under branch, numbered 1 to 1",
    ),
    "derived more often than declared": (
        ["""UPDATE incarnations SET derives = '{"branch": 1}'"""],
        "derived",
        "2 samples were derived from g0/0 under branch, but the graph derives 1 at most",
    ),
    "derived, but not declared": (
        ["UPDATE incarnations SET derives = '{}'"],
        "derived",
        "2 samples were derived from g0/0 under branch, but the graph derives 0 at most",
    ),
    "a derived sample that was admitted": (
        [f"DELETE FROM derived {BRANCH}"],
        "groups",
        "group g0 was admitted with 4 samples, but the graph's groups have 3",
    ),
    "a branch trained twice": (
        [f"INSERT INTO uses SELECT sample_id, trainer, 1, 2, tokens, 0, 0, 0 FROM uses {BRANCH}"],
        "uses",
        "sample g0/0/branch.0 was used 2 times by trainer: its tokens are trained more than once",
    ),
    "a changed token in a branch": (
        [f"UPDATE spans SET digest = 'x' {BRANCH}"],
        "spans",
        "of sample g0/0/branch.0 after its first 5 at step 1, and no request sampled exactly these tokens",
    ),
}

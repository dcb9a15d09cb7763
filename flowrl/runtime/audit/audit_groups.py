"""The audit's rules for groups, tickets, steps and evaluations."""

from __future__ import annotations

from flowrl.runtime.audit.audit_check import AT_STEP, AT_TICKET, Check

GROUPS = (
    Check(
        "groups",
        "group {0} has two samples with the number {1}",
        "SELECT group_id, member FROM samples GROUP BY group_id, member HAVING COUNT(*) > 1",
    ),
    Check(
        "groups",
        "group {0} was admitted with {1} samples, but the graph's groups have {2}",
        "SELECT t.group_id, (SELECT COUNT(*) FROM samples s WHERE s.group_id = t.group_id) AS found,"
        f" {AT_TICKET.format('group_size')} AS wanted FROM tickets t WHERE found <> wanted",
    ),
    Check(
        "groups",
        "sample {0} has the number {1} in its group, in epoch {2}; neither is below 0",
        "SELECT sample_id, member, epoch FROM samples WHERE MIN(member, epoch) < 0",
    ),
    Check(
        "groups",
        "step {0} trained samples of {1} groups, but a batch has {2} at most",
        "SELECT u.step, COUNT(DISTINCT group_id) AS found,"
        f" {AT_STEP.format('groups_per_batch')} AS most"
        " FROM uses u JOIN samples USING (sample_id) WHERE trainer = :main GROUP BY u.step HAVING found > most",
    ),
)

TICKETS = (
    Check(
        "tickets",
        "{2} tickets were taken, numbered {0} to {1}; the numbers have to start at 0 and leave none out",
        "SELECT MIN(ticket), MAX(ticket), COUNT(*) FROM tickets"
        " HAVING COUNT(*) > 0 AND (MIN(ticket) <> 0 OR MAX(ticket) <> COUNT(*) - 1)",
    ),
    Check(
        "tickets",
        "ticket {0} has unknown state {1!r}",
        "SELECT ticket, state FROM tickets WHERE state NOT IN ('open', 'trained', 'dropped')",
    ),
    Check(
        "tickets",
        "ticket {0} does not record which versions were held when it was taken, but {1!r}",
        "SELECT ticket, held FROM tickets WHERE NOT json_valid(held) OR json_type(held) <> 'object'",
    ),
    Check(
        "tickets",
        "group {0} has samples, but never took a ticket",
        "SELECT DISTINCT group_id FROM samples WHERE group_id NOT IN (SELECT group_id FROM tickets)",
    ),
    Check(
        "tickets",
        "ticket {0} was taken for group {1}, which has no samples",
        "SELECT ticket, group_id FROM tickets WHERE group_id NOT IN (SELECT group_id FROM samples)",
    ),
    Check(
        "tickets",
        "ticket {0} is {1}, but sample {2} of its group is {3}",
        "SELECT ticket, t.state, sample_id, s.state FROM tickets t JOIN samples s USING (group_id)"
        " WHERE t.state = 'dropped' AND s.state = 'trained' OR t.state <> 'open' AND s.state = 'in_flight'",
    ),
    Check(
        "tickets",
        "ticket {0} is open, but nothing of its group {1} is in flight",
        "SELECT ticket, group_id FROM tickets t WHERE state = 'open' AND NOT EXISTS"
        " (SELECT 1 FROM samples s WHERE s.group_id = t.group_id AND s.state = 'in_flight')",
    ),
    Check(
        "tickets",
        "ticket {0} is trained, but no sample of its group {1} is",
        "SELECT ticket, group_id FROM tickets t WHERE state = 'trained' AND NOT EXISTS"
        " (SELECT 1 FROM samples s WHERE s.group_id = t.group_id AND s.state = 'trained')",
    ),
    Check(
        "tickets",
        "ticket {0} is {1}, and came back with step {2}",
        "SELECT ticket, state, step FROM tickets WHERE (state = 'trained') <> (step IS NOT NULL)",
    ),
    Check(
        "tickets",
        "ticket {0} came back with step {1}, but its group was trained last at step {2}",
        "SELECT * FROM (SELECT ticket, step, (SELECT MAX(s.step) FROM samples s WHERE s.group_id = t.group_id) AS last"
        " FROM tickets t WHERE state = 'trained' AND NOT :several) WHERE step IS NOT last",
    ),
    Check(
        "tickets",
        "ticket {0} came back with step {1}, which no trainer has finished",
        "SELECT ticket, step FROM tickets WHERE step IS NOT NULL AND step NOT IN (SELECT step FROM steps)",
    ),
)

STEPS = (
    Check(
        "steps",
        "{0} has finished {3} steps, numbered {1} to {2}; the numbers have to start at 1 and leave none out",
        "SELECT trainer, MIN(step), MAX(step), COUNT(*) FROM steps GROUP BY trainer"
        " HAVING MIN(step) <> 1 OR MAX(step) <> COUNT(*)",
    ),
    Check(
        "steps",
        "{0} finished step {1} in unknown incarnation {2}",
        "SELECT trainer, step, incarnation FROM steps WHERE incarnation NOT IN (SELECT number FROM incarnations)",
    ),
    Check(
        "steps",
        "{0} finished step {1}, but it is no trainer of the graph",
        "SELECT trainer, step FROM steps"
        " WHERE :trainers IS NOT NULL AND trainer NOT IN (SELECT value FROM json_each(:trainers))",
    ),
    Check(
        "steps",
        "{1} incarnations have begun, and the last has the number {0}; they count from 0",
        "SELECT MAX(number), COUNT(*) FROM incarnations HAVING MAX(number) IS NOT COUNT(*) - 1",
    ),
)

EVALUATIONS = (
    Check(
        "evaluations",
        "there is an answer of an evaluation {0} training, but there was no such evaluation",
        "SELECT DISTINCT phase FROM evaluations WHERE phase NOT IN ('before', 'during', 'after')",
    ),
    Check(
        "evaluations",
        "the evaluation {0} training at step {1} ran on versions {2} to {3}; it has to run on the version of its step",
        "SELECT phase, step, MIN(oldest_version) AS oldest, MAX(newest_version) AS newest FROM evaluations"
        " GROUP BY phase, step HAVING oldest <> step OR newest <> step",
    ),
    Check(
        "evaluations",
        "the evaluation {0} training at step {1} has answer {4} to prompt {3} of task {2!r} {5} times",
        "SELECT phase, step, task, prompt_id, member, COUNT(*) FROM evaluations GROUP BY 1, 2, 3, 4, 5"
        " HAVING COUNT(*) > 1",
    ),
    Check(
        "evaluations",
        "the evaluation {0} training at step {1}: answer {3} to prompt {2} has {4} tokens, and is correct {5} times",
        "SELECT phase, step, prompt_id, member, response_tokens, correct FROM evaluations"
        " WHERE response_tokens < 0 OR member < 0 OR correct NOT IN (0, 1)",
    ),
)

RUN_CHECKS = (*GROUPS, *TICKETS, *STEPS, *EVALUATIONS)

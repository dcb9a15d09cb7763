"""The audit's rules for samples: their states, tokens and versions, and their use by the trainers.

There are no rules for times, because clocks are adjusted and differ between machines, and none for prompt ids, which
the source chooses. Only the chain protects these columns.
"""

from __future__ import annotations

from flowrl.runtime.audit.audit_check import AT_STEP, HELD, Check

ENDED = "(SELECT ended_s FROM incarnations ORDER BY number DESC LIMIT 1) IS NOT NULL"
NEVER_MASKED = "NOT EXISTS (SELECT 1 FROM incarnations WHERE window IS NULL OR window = 0)"

STATES = (
    Check(
        "state",
        "sample {0} has unknown state {1!r}",
        "SELECT sample_id, state FROM samples WHERE state NOT IN ('in_flight','trained','filtered','failed','dropped')",
    ),
    Check(
        "state",
        "sample {0} is {1} without a reason",
        "SELECT sample_id, state FROM samples WHERE state IN ('filtered','failed','dropped') AND reason IS NULL",
    ),
    Check(
        "state",
        "sample {0} is {1}, but has a reason, {2!r}",
        "SELECT sample_id, state, reason FROM samples WHERE state IN ('in_flight','trained') AND reason IS NOT NULL",
    ),
    Check(
        "state",
        "sample {0} is {1}, but is recorded as trained at step {2}",
        "SELECT sample_id, state, step FROM samples WHERE state <> 'trained' AND (step IS NOT NULL"
        " OR trained_version IS NOT NULL OR oldest_trained_version IS NOT NULL OR trained_s IS NOT NULL)",
    ),
    Check(
        "state",
        "sample {0} is trained, but at no step",
        "SELECT sample_id FROM samples WHERE state = 'trained' AND (step IS NULL OR trained_s IS NULL)",
    ),
    Check(  # a run that fails loses the last events of its nodes: only an orderly end books all
        "state",
        "sample {0} is trained, but was never generated",
        f"SELECT sample_id FROM samples WHERE state = 'trained' AND generated_s IS NULL AND {ENDED}",
    ),
    Check(
        "state",
        "sample {0} is in flight, but the run ended normally",
        f"SELECT sample_id FROM samples WHERE state = 'in_flight' AND {ENDED}",
    ),
)

TOKENS = (
    Check(
        "tokens",
        "sample {0} has a count below 0: {1} tokens in its prompt, {2} generated, {3} trained, {4} stale, {5} masked, "
        "{6} redone",
        "SELECT sample_id, prompt_tokens, response_tokens, trained_tokens, stale_tokens, masked_tokens, redone_tokens"
        " FROM samples WHERE MIN(prompt_tokens, response_tokens, trained_tokens, stale_tokens, masked_tokens,"
        " redone_tokens) < 0",
    ),
    Check(
        "tokens",
        "sample {0}: {1} policy tokens generated, but {2} trained, {3} stale and {4} masked",
        "SELECT sample_id, response_tokens, trained_tokens, stale_tokens, masked_tokens FROM samples"
        " WHERE state = 'trained' AND trained_tokens + stale_tokens + masked_tokens <> response_tokens",
    ),
    Check(
        "tokens",
        "sample {0} is {1}, but {2} of its tokens count as trained",
        "SELECT sample_id, state, trained_tokens FROM samples WHERE state <> 'trained' AND trained_tokens <> 0",
    ),
    Check(
        "tokens",
        "sample {0} is {1} with {2} stale and {3} masked tokens of {4} generated",
        "SELECT sample_id, state, stale_tokens, masked_tokens, response_tokens FROM samples"
        " WHERE state <> 'trained' AND stale_tokens + masked_tokens > response_tokens",
    ),
    Check(
        "tokens",
        "sample {0} is dropped as stale, but {1} of its {2} tokens are stale",
        "SELECT sample_id, stale_tokens, response_tokens FROM samples"
        " WHERE reason = 'stale' AND (stale_tokens = 0 OR stale_tokens + masked_tokens <> response_tokens)",
    ),
    Check(
        "tokens",
        "sample {0} has {1} stale tokens, but no incarnation of the run masked any",
        f"SELECT sample_id, stale_tokens FROM samples WHERE stale_tokens > 0 AND {NEVER_MASKED}"
        f" UNION ALL SELECT sample_id, stale_tokens FROM uses WHERE stale_tokens > 0 AND {NEVER_MASKED}",
    ),
)

USES = (
    Check(
        "uses",
        "sample {0} was used {2} times by {1}: its tokens are trained more than once",
        "SELECT sample_id, trainer, COUNT(*) FROM uses GROUP BY sample_id, trainer HAVING COUNT(*) > 1",
    ),
    Check(
        "uses",
        "{1} used sample {0}, which was never admitted",
        "SELECT sample_id, trainer FROM uses WHERE sample_id NOT IN (SELECT sample_id FROM samples)",
    ),
    Check(
        "uses",
        "{1} used sample {0} at step {2}, which it has not finished",
        "SELECT sample_id, trainer, step FROM uses u WHERE NOT EXISTS"
        " (SELECT 1 FROM steps p WHERE p.trainer = u.trainer AND p.step = u.step)",
    ),
    Check(
        "uses",
        "{1} used sample {0} at step {2}, but the sample is {3}",
        "SELECT sample_id, trainer, uses.step, state FROM uses JOIN samples USING (sample_id)"
        " WHERE state <> 'trained' AND NOT (state = 'in_flight' AND :several)",
    ),
    Check(
        "uses",
        "sample {0} is trained at step {1} with {2} tokens, but no use by a trainer records this",
        "SELECT sample_id, step, trained_tokens FROM samples s WHERE state = 'trained' AND NOT EXISTS"
        " (SELECT 1 FROM uses u WHERE u.sample_id = s.sample_id AND u.step = s.step AND u.tokens = s.trained_tokens"
        " AND u.stale_tokens = s.stale_tokens AND u.masked_tokens = s.masked_tokens"
        " AND u.oldest_version IS s.oldest_trained_version)",
    ),
    Check(
        "uses",
        "{1} used sample {0} with {2} tokens trained, {3} stale and {4} masked, of {5} generated",
        "SELECT sample_id, trainer, tokens, u.stale_tokens, u.masked_tokens, response_tokens"
        " FROM uses u JOIN samples s USING (sample_id) WHERE MIN(tokens, u.stale_tokens, u.masked_tokens) < 0"
        " OR tokens + u.stale_tokens + u.masked_tokens > response_tokens",
    ),
)

LOSSES = (
    Check(
        "losses",
        "{1} left out sample {0}, which was never admitted",
        "SELECT sample_id, trainer FROM losses WHERE sample_id NOT IN (SELECT sample_id FROM samples)",
    ),
    Check(
        "losses",
        "{1} left out sample {0} {2} times",
        "SELECT sample_id, trainer, COUNT(*) FROM losses GROUP BY sample_id, trainer HAVING COUNT(*) > 1",
    ),
    Check(
        "losses",
        "{1} both used sample {0} and left it out",
        "SELECT sample_id, trainer FROM losses JOIN uses USING (sample_id, trainer)",
    ),
    Check(
        "losses",
        "{1} left out sample {0} with unknown state {2!r}",
        "SELECT sample_id, trainer, state FROM losses WHERE state NOT IN ('filtered','failed','dropped')",
    ),
    Check(
        "losses",
        "sample {0} is {1} ({2}), but no trainer left it out with that state and reason",
        "SELECT sample_id, s.state, reason FROM samples s JOIN tickets t USING (group_id)"
        f" WHERE s.state NOT IN ('in_flight', 'trained') AND (SELECT COUNT(*) FROM {HELD}) > 1"
        " AND NOT EXISTS (SELECT 1 FROM losses l"
        " WHERE l.sample_id = s.sample_id AND l.state = s.state AND l.reason = s.reason)",
    ),
    Check(
        "losses",
        "sample {0} is {1}, but {2} neither used it nor left it out",
        f"SELECT sample_id, s.state, h.key FROM tickets t JOIN samples s USING (group_id), {HELD} h"
        f" WHERE :several AND s.state <> 'in_flight' AND (SELECT COUNT(*) FROM {HELD}) > 1"
        " AND NOT EXISTS (SELECT 1 FROM uses u WHERE u.sample_id = s.sample_id AND u.trainer = h.key)"
        " AND NOT EXISTS (SELECT 1 FROM losses l WHERE l.sample_id = s.sample_id AND l.trainer = h.key)",
    ),
)

VERSIONS = (
    Check(
        "versions",
        "sample {0}: step {1} updates version {2}, not the one before it",
        "SELECT sample_id, step, trained_version FROM samples"
        " WHERE step IS NOT NULL AND trained_version IS NOT step - 1"
        " UNION ALL SELECT sample_id, step, version FROM uses WHERE version <> step - 1",
    ),
    Check(
        "versions",
        "sample {0} was admitted when version {1} was held everywhere, but has tokens of version {2}",
        "SELECT sample_id, born_version, oldest_version FROM samples WHERE oldest_version < born_version",
    ),
    Check(
        "versions",
        "sample {0} was admitted when version {1} was held everywhere, but its ticket says {2}",
        f"SELECT sample_id, born_version, h.value FROM samples JOIN tickets t USING (group_id), {HELD} h"
        " WHERE h.key = :main AND h.value <> born_version OR born_version < 0",
    ),
    Check(
        "versions",
        "sample {0}: versions out of order: tokens of {1} to {2}, trained ones from {3}, updating {4}",
        "SELECT s.sample_id, s.oldest_version, newest_version, u.oldest_version, u.version"
        " FROM samples s LEFT JOIN uses u ON u.sample_id = s.sample_id AND u.trainer = :main"
        " WHERE s.oldest_version > newest_version OR newest_version > u.version"
        " OR u.oldest_version < s.oldest_version OR u.oldest_version > newest_version",
    ),
    Check(
        "versions",
        "sample {0} was trained whole and its oldest token is of version {1}, but the oldest trained version is {2}",
        "SELECT sample_id, s.oldest_version, u.oldest_version FROM samples s JOIN uses u USING (sample_id)"
        " WHERE u.trainer = :main AND u.tokens = response_tokens AND u.oldest_version <> s.oldest_version",
    ),
    Check(
        "versions",
        "sample {0}: its age at {1} counts from version {2}, but {3} of its weights was held everywhere at admission",
        "SELECT sample_id, u.trainer, u.oldest_version, h.value FROM uses u JOIN samples USING (sample_id)"
        f" JOIN tickets t USING (group_id) JOIN {HELD} h ON h.key = u.trainer"
        " WHERE u.trainer IN (SELECT value FROM json_each(:own_clock)) AND u.oldest_version IS NOT h.value",
    ),
    Check(
        "versions",
        "sample {0} has {1} trained tokens of no version",
        "SELECT sample_id, u.tokens FROM uses u JOIN samples s USING (sample_id)"
        f" WHERE u.tokens > 0 AND u.oldest_version IS NULL AND {AT_STEP.format('max_staleness')} IS NOT NULL"
        " AND (:holders IS NULL OR generator IS NULL OR generator = ''"
        " OR SUBSTR(generator, 1, INSTR(generator || '/', '/') - 1) IN (SELECT value FROM json_each(:holders)))",
    ),
    Check(
        "bound",
        "sample {0}: a token of version {1} trained version {2} of {3} (staleness {4}), but the bound is {5}",
        "SELECT * FROM (SELECT sample_id, oldest_version, version, trainer, version - oldest_version AS age,"
        f" {AT_STEP.format('max_staleness')} AS bound FROM uses u) WHERE age > bound",
    ),
)

SAMPLE_CHECKS = (*STATES, *TOKENS, *USES, *LOSSES, *VERSIONS)

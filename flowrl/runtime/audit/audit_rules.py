"""The audit's rules, each a query that returns the wrong rows.

For numbers that a resume may change, the values in force at the step, or when the ticket was taken, apply. There are no
rules for times, because clocks are adjusted and differ between machines, and none for prompt ids, which the source
chooses. Only the chain protects these columns.

A span agrees with a request of its sample if number of tokens, place and digest are equal. Then the ids of the whole
context, the sampled ids, their logprobs, their versions and what nodes have added to the digest are equal too
(flowrl.runtime.ledger.token_digest).

A sample that was not asked turn by turn is booked together with its requests. The requests of an episode, or of a
derived sample, are booked by generators, and the sample by another node, so a run that is in progress, or has failed,
may lack some of these rows. A span that differs from the request at its place is a violation at any time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """One violation of a rule.

    `kind` is state, tokens, uses, reuses, losses, versions, bound, spans, requests, episodes, groups, derived, tickets,
    steps, evaluations, metrics, checkpoints or chain.
    """

    kind: str
    text: str


AT_STEP = (
    "(SELECT i.{0} FROM steps p JOIN incarnations i ON i.number = p.incarnation"
    " WHERE p.trainer = u.trainer AND p.step = u.step)"
)
AT_TICKET = "(SELECT {0} FROM incarnations WHERE first_ticket <= t.ticket ORDER BY number DESC LIMIT 1)"
HELD = "json_each(CASE WHEN json_valid(t.held) THEN t.held ELSE '{}' END)"


@dataclass(frozen=True)
class Check:
    """One rule; `text` is formatted with the columns of each row that `query` returns.

    `:main` is the main trainer, `:several` whether there are others; `:trainers`, `:own_clock` and `:holders` are lists
    of nodes as JSON. Uses at steps before `:since` are as they were when the rules were last asked.
    """

    kind: str
    text: str
    query: str


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

NOT_FINISHED = (
    "EXISTS (SELECT 1 FROM samples s JOIN samples o USING (group_id) WHERE s.sample_id = u.sample_id"
    " AND (o.state = 'in_flight' AND NOT :several OR EXISTS (SELECT 1 FROM uses f"
    " WHERE f.sample_id = o.sample_id AND f.trainer = u.trainer AND f.step >= u.step)))"
)
"""True for a reuse `u` of a sample whose group had samples that the trainer had not used yet, or nobody had lost."""
EARLIER = "SELECT {0} FROM uses f WHERE f.sample_id = u.sample_id AND f.trainer = u.trainer AND f.step < u.step"

REUSES = (
    Check(
        "reuses",
        "{1} used sample {0} again, which was never admitted",
        "SELECT sample_id, trainer FROM reuses WHERE sample_id NOT IN (SELECT sample_id FROM samples)",
    ),
    Check(
        "reuses",
        "{1} used sample {0} again at step {2}, which it has not finished",
        "SELECT sample_id, trainer, step FROM reuses u WHERE NOT EXISTS"
        " (SELECT 1 FROM steps p WHERE p.trainer = u.trainer AND p.step = u.step)",
    ),
    Check(
        "reuses",
        "{1} used sample {0} again at step {2}, but never before",
        f"SELECT sample_id, trainer, step FROM reuses u WHERE NOT EXISTS ({EARLIER.format(1)})",
    ),
    Check(
        "reuses",
        "{1} used sample {0} again at step {2}, but its group was not finished then",
        f"SELECT sample_id, trainer, step FROM reuses u WHERE {NOT_FINISHED}",
    ),
    Check(
        "reuses",
        "{1} used sample {0} again at step {2} after {3} uses by its own count, but after {4} by the ledger's",
        "SELECT * FROM (SELECT sample_id, trainer, step, number, (SELECT COUNT(*) FROM reuses b"
        " WHERE b.sample_id = u.sample_id AND b.trainer = u.trainer AND b.step <= u.step) AS known FROM reuses u)"
        " WHERE number <> known",
    ),
    Check(
        "reuses",
        "{1} used sample {0} {2} times by step {3}, but the run allows {4}",
        "SELECT * FROM (SELECT sample_id, trainer, number + 1 AS times, step,"
        f" COALESCE({AT_STEP.format('max_uses')}, 1) AS most FROM reuses u) WHERE times > most",
    ),
    Check(
        "reuses",
        "{1} used sample {0} again at step {2} with {3} tokens in the loss and {4} masked, of {5} generated",
        "SELECT sample_id, trainer, u.step, tokens, u.masked_tokens, response_tokens FROM reuses u JOIN samples s"
        " USING (sample_id) WHERE tokens < 1 OR u.masked_tokens < 0 OR tokens + u.masked_tokens > response_tokens",
    ),
    Check(
        "reuses",
        "{1} used sample {0} again at step {2}, but the sample is {3}",
        "SELECT sample_id, trainer, u.step, state FROM reuses u JOIN samples USING (sample_id)"
        " WHERE state <> 'trained' AND NOT (state = 'in_flight' AND :several)",
    ),
    Check(
        "reuses",
        "{1} used sample {0} again and was fed {2} policy tokens of it at step {3}, but {4} were generated",
        "SELECT * FROM (SELECT u.sample_id, u.trainer, CAST((SELECT TOTAL(tokens) FROM spans p WHERE"
        " p.sample_id = u.sample_id AND p.trainer = u.trainer AND p.step = u.step) AS INTEGER) AS fed, u.step,"
        " response_tokens FROM reuses u JOIN samples s USING (sample_id) WHERE generated_s IS NOT NULL)"
        " WHERE fed <> response_tokens",
    ),
    Check(
        "versions",
        "sample {0}: step {1} updates version {2}, not the one before it, in a reuse",
        "SELECT sample_id, step, version FROM reuses WHERE version <> step - 1",
    ),
    Check(
        "versions",
        "sample {0}: the oldest token of a reuse is of version {1}, but its tokens are of {2} to {3}",
        "SELECT sample_id, u.oldest_version, s.oldest_version, s.newest_version FROM reuses u JOIN samples s"
        " USING (sample_id) WHERE (u.oldest_version BETWEEN s.oldest_version AND s.newest_version) IS NOT TRUE"
        " AND s.oldest_version IS NOT NULL",
    ),
    Check(
        "bound",
        "sample {0}: a token of version {1} trained version {2} of {3} again (age {4}), but a reuse is bound by {5}",
        "SELECT * FROM (SELECT sample_id, oldest_version, version, trainer, version - oldest_version AS age,"
        f" {AT_STEP.format('max_reused_age')} AS bound FROM reuses u) WHERE age > bound",
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


AGREES = "r.sample_id = p.sample_id AND r.digest = p.digest AND r.tokens = p.tokens AND r.context_tokens = p.start"
AT_PLACE = "r.sample_id = p.sample_id AND r.context_tokens = p.start"
IS_EPISODE = "EXISTS (SELECT 1 FROM episodes e WHERE e.sample_id = s.sample_id)"
IS_DERIVED = "EXISTS (SELECT 1 FROM derived d WHERE d.sample_id = s.sample_id)"
REPORTED = "(s.generated_s IS NOT NULL OR EXISTS (SELECT 1 FROM requests r WHERE r.sample_id = s.sample_id))"
WHOLE = f"(s.generated_s IS NOT NULL AND NOT {IS_EPISODE} AND NOT {IS_DERIVED} OR {REPORTED} AND {ENDED})"
"""True for a sample of which all requests must be in the ledger."""
BEFORE = "b.sample_id = r.sample_id AND b.incarnation < r.incarnation"
"""True for a row `b` of an earlier incarnation, from which the resumed run of row `r` continues."""
SAMPLED = "(SELECT TOTAL(r.tokens) FROM requests r WHERE r.sample_id = s.sample_id AND r.abandoned IS {})"
TIMES_SAMPLED = f"(SELECT COUNT(*) FROM requests r WHERE {AGREES} AND r.abandoned IS NULL)"
"""More than 1 if a template shows two turns of an episode the same context, and both get the same answer."""

SPANS = (
    Check(
        "spans",
        "{1} was fed a policy span at step {2} of sample {0}, which was never admitted",
        "SELECT sample_id, trainer, step FROM spans WHERE sample_id NOT IN (SELECT sample_id FROM samples)",
    ),
    Check(
        "spans",
        "{1} was fed sample {0} at step {2}, which it has not finished",
        "SELECT DISTINCT sample_id, trainer, step FROM spans u WHERE NOT EXISTS"
        " (SELECT 1 FROM steps p WHERE p.trainer = u.trainer AND p.step = u.step)",
    ),
    Check(
        "spans",
        "{1} was fed {4} tokens of sample {0} after its first {3} at step {2}, and no request sampled exactly these "
        "tokens in this context: a node has changed ids, policy mask, logprobs or versions, or a column that the "
        "digest covers, after they were sampled",
        "SELECT sample_id, trainer, p.step, start, tokens FROM spans p JOIN samples s USING (sample_id)"
        f" WHERE NOT EXISTS (SELECT 1 FROM requests r WHERE {AGREES}) AND ({WHOLE}"
        f" OR EXISTS (SELECT 1 FROM requests r WHERE {AT_PLACE} AND r.abandoned IS NULL))",
    ),
    Check(
        "spans",
        "{1} was fed tokens of sample {0} at step {2} from request {3}, which was abandoned ({4})",
        "SELECT p.sample_id, p.trainer, p.step, r.request_id, r.abandoned FROM spans p"
        f" JOIN requests r ON {AGREES} WHERE r.abandoned IS NOT NULL"
        f" AND NOT EXISTS (SELECT 1 FROM requests r WHERE {AGREES} AND r.abandoned IS NULL)",
    ),
    Check(
        "spans",
        "{1} was fed the {3} tokens of sample {0} after its first {2} {4} times",
        "SELECT sample_id, trainer, start, tokens, COUNT(*) AS times FROM spans p"
        f" GROUP BY sample_id, trainer, digest, start HAVING times > 1 AND times > {TIMES_SAMPLED} * (1 +"
        " (SELECT COUNT(*) FROM reuses n WHERE n.sample_id = p.sample_id AND n.trainer = p.trainer))",
    ),
    Check(
        "spans",
        "{1} used sample {0} and was fed {2} policy tokens of it, but {3} were generated",
        "SELECT u.sample_id, u.trainer, CAST(fed AS INTEGER), response_tokens FROM (SELECT sample_id, trainer,"
        " (SELECT TOTAL(tokens) FROM spans p WHERE p.sample_id = uses.sample_id AND p.trainer = uses.trainer"
        " AND p.step = uses.step) AS fed FROM uses) u"
        " JOIN samples s USING (sample_id) WHERE generated_s IS NOT NULL AND fed <> response_tokens",
    ),
)

REQUESTS = (
    Check(
        "requests",
        "request {0} is of sample {1}, which was never admitted",
        "SELECT request_id, sample_id FROM requests WHERE sample_id NOT IN (SELECT sample_id FROM samples)",
    ),
    Check(
        "requests",
        "request {0} of sample {1} has impossible numbers: {2} tokens after {3}, {4} of these cached; attempt {5}, "
        "turn {6}; versions {7} to {8}",
        "SELECT request_id, sample_id, tokens, context_tokens, cached_tokens, attempt, turn, oldest_version,"
        " newest_version FROM requests WHERE MIN(tokens, context_tokens, COALESCE(cached_tokens, 0), attempt, turn) < 0"
        " OR cached_tokens > context_tokens OR oldest_version > newest_version",
    ),
    Check(
        "requests",
        "sample {0} was generated, but {1} of its {2} policy tokens were sampled by its requests",
        "SELECT sample_id, CAST(sampled AS INTEGER), response_tokens FROM"
        f" (SELECT *, {SAMPLED.format('NULL')} AS sampled FROM samples s"
        f" WHERE generated_s IS NOT NULL AND {WHOLE}) WHERE sampled <> response_tokens",
    ),
    Check(
        "requests",
        "sample {0} has {1} tokens in abandoned requests, but {2} redone tokens",
        "SELECT sample_id, CAST(abandoned AS INTEGER), redone_tokens FROM"
        f" (SELECT *, {SAMPLED.format('NOT NULL')} AS abandoned, {IS_EPISODE} AS is_episode FROM samples s)"
        " WHERE abandoned > redone_tokens OR is_episode AND abandoned <> redone_tokens",
    ),
    Check(
        "requests",
        "{1} requests of sample {0} sampled the same tokens in the same context, and none was abandoned",
        "SELECT sample_id, COUNT(*) FROM requests WHERE abandoned IS NULL GROUP BY sample_id, digest"
        " HAVING COUNT(*) > COUNT(DISTINCT attempt || '.' || turn)",
    ),
    Check(
        "requests",
        "request {0} was neither abandoned nor fed to {2}, which used its sample {1}",
        "SELECT r.request_id, r.sample_id, u.trainer FROM requests r JOIN uses u USING (sample_id)"
        f" WHERE abandoned IS NULL AND r.tokens > 0 AND {ENDED} AND NOT EXISTS"
        f" (SELECT 1 FROM spans p WHERE {AGREES} AND p.trainer = u.trainer)",
    ),
    Check(
        "requests",
        "attempt {1} of sample {0} has a turn {2}, but only {3} turns",
        "SELECT sample_id, attempt, MAX(turn) AS last, COUNT(DISTINCT turn) FROM requests r"
        f" GROUP BY sample_id, attempt HAVING {ENDED} AND last <> COUNT(DISTINCT turn) - 1",
    ),
)

EPISODES = (
    Check(
        "episodes",
        "there is an episode of sample {0}, which was never admitted",
        "SELECT sample_id FROM episodes WHERE sample_id NOT IN (SELECT sample_id FROM samples)",
    ),
    Check(
        "episodes",
        "the episode of sample {0} has impossible numbers: {1} attempts, {2} turns, {3} seconds",
        "SELECT sample_id, attempts, turns, seconds FROM episodes WHERE attempts < 1 OR turns < 0 OR seconds < 0",
    ),
    Check(
        "episodes",
        "the episode of sample {0} had {1} turns in attempt {2}, but {3} requests that count, in attempts {4} to {5}",
        "SELECT e.sample_id, turns, attempts - 1, COUNT(r.turn), MIN(r.attempt), MAX(r.attempt)"
        " FROM episodes e LEFT JOIN requests r ON r.sample_id = e.sample_id AND r.abandoned IS NULL"
        f" WHERE cause IS NULL AND {ENDED} GROUP BY e.sample_id"
        " HAVING COUNT(r.turn) <> turns OR MIN(r.attempt) <> attempts - 1 OR MAX(r.attempt) <> attempts - 1",
    ),
    Check(
        "episodes",
        "the episode of sample {0} was begun {1} times, but {2} of these attempts are void",
        "SELECT sample_id, attempts, (SELECT COUNT(DISTINCT attempt) FROM attempts a WHERE a.sample_id = e.sample_id"
        " AND (a.incarnation = e.incarnation OR a.attempt < wanted)) AS void"
        " FROM (SELECT *, attempts - (cause IS NULL) AS wanted FROM episodes) e WHERE void <> wanted",
    ),
    Check(
        "episodes",
        "{2} attempts of sample {0} are void, numbered {3} to {1}; they count from 0 and leave none out",
        "SELECT sample_id, MAX(attempt) AS last, COUNT(*), MIN(attempt) AS first FROM attempts r"
        " GROUP BY sample_id, incarnation HAVING last - first <> COUNT(*) - 1 OR COUNT(DISTINCT attempt) <> COUNT(*)"
        f" OR first > 0 AND NOT EXISTS (SELECT 1 FROM attempts b WHERE {BEFORE} AND b.attempt = first - 1)",
    ),
    Check(
        "episodes",
        "attempt {1} of sample {0} is void, but its request {2} is not abandoned",
        "SELECT sample_id, attempt, request_id FROM attempts a JOIN requests r USING (sample_id, attempt)"
        " WHERE abandoned IS NULL AND r.incarnation <= a.incarnation",
    ),
    Check(
        "episodes",
        "the episode of sample {0} failed ({1}), but the sample is {2}",
        "SELECT sample_id, cause, state FROM episodes JOIN samples USING (sample_id)"
        " WHERE cause IS NOT NULL AND (state = 'trained' OR truncated IS NOT NULL)",
    ),
)


GROUPS = (
    Check(
        "groups",
        "group {0} has two samples with the number {1}",
        "SELECT group_id, member FROM samples GROUP BY group_id, member HAVING COUNT(*) > 1",
    ),
    Check(
        "groups",
        "group {0} was admitted with {1} samples, but the graph's groups have {2}",
        "SELECT t.group_id, (SELECT COUNT(*) FROM samples s WHERE s.group_id = t.group_id AND s.sample_id NOT IN"
        " (SELECT sample_id FROM derived)) AS found,"
        f" {AT_TICKET.format('group_size')} AS wanted FROM tickets t WHERE found <> wanted",
    ),
    Check(
        "groups",
        "sample {0} has the number {1} in its group, in epoch {2}; neither is below 0",
        "SELECT sample_id, member, epoch FROM samples WHERE MIN(member, epoch) < 0",
    ),
)

MOST_DERIVED = "CASE WHEN json_valid(derives) THEN json_extract(derives, '$.\"' || label || '\"') END"

DERIVED = (
    Check(
        "derived",
        "sample {0} was derived from {1}, but never admitted",
        "SELECT sample_id, parent_id FROM derived WHERE sample_id NOT IN (SELECT sample_id FROM samples)",
    ),
    Check(
        "derived",
        "sample {0} of group {1} was derived from {2}, which is no sample of this group",
        "SELECT d.sample_id, s.group_id, parent_id FROM derived d JOIN samples s USING (sample_id) WHERE NOT EXISTS"
        " (SELECT 1 FROM samples p WHERE p.sample_id = d.parent_id AND p.group_id = s.group_id)",
    ),
    Check(
        "derived",
        "sample {0} has the number {1} in its group, and {2}, from which it was derived, the number {3}; what is "
        "derived comes after what it is derived from",
        "SELECT d.sample_id, s.member, parent_id, p.member FROM derived d JOIN samples s USING (sample_id)"
        " JOIN samples p ON p.sample_id = d.parent_id WHERE s.member <= p.member",
    ),
    Check(
        "derived",
        "sample {0} is number {3} of those derived from {1} under {2}, so its id has to be {1}/{2}.{3}",
        "SELECT sample_id, parent_id, label, ordinal FROM derived"
        " WHERE sample_id <> parent_id || '/' || label || '.' || ordinal",
    ),
    Check(
        "derived",
        "{2} samples were derived from {0} under {1}, numbered {3} to {4}; the numbers have to start at 0 and leave "
        "none out",
        "SELECT parent_id, label, COUNT(*), MIN(ordinal) AS first, MAX(ordinal) AS last FROM derived"
        " GROUP BY parent_id, label HAVING first <> 0 OR last <> COUNT(*) - 1",
    ),
    Check(
        "derived",
        "{2} samples were derived from {0} under {1}, but the graph derives {3} at most",
        "SELECT parent_id, label, found, COALESCE(most, 0) FROM (SELECT parent_id, label, COUNT(*) AS found,"
        f" {AT_TICKET.format('derives IS NOT NULL')} AS declared, {AT_TICKET.format(MOST_DERIVED)} AS most"
        " FROM derived JOIN samples USING (sample_id) JOIN tickets t USING (group_id) GROUP BY parent_id, label)"
        " WHERE declared AND found > COALESCE(most, 0)",
    ),
)

TICKETS = (
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

NUM_NEEDED = (
    "(1 + a.asks * (SELECT COUNT(*) FROM samples m WHERE m.group_id = a.group_id"
    " AND m.sample_id NOT IN (SELECT sample_id FROM derived)))"
)
"""The groups that may be admitted because of the ticket `a`, its own included."""

STEPS = (
    Check(
        "tickets",
        "group {0} was asked for by sample {1}, which was not admitted before it",
        "SELECT a.group_id, a.asked_by FROM tickets a WHERE asked_by IS NOT NULL AND NOT EXISTS"
        " (SELECT 1 FROM samples s JOIN tickets t USING (group_id)"
        " WHERE s.sample_id = a.asked_by AND t.ticket < a.ticket)",
    ),
    Check(
        "tickets",
        "sample {0} asked for {1} groups, but tickets were kept for {2}",
        "SELECT s.sample_id, SUM(num) AS asked, t.asks FROM"
        f" (SELECT a.asked_by, {NUM_NEEDED} AS num FROM tickets a WHERE asked_by IS NOT NULL) g"
        " JOIN samples s ON s.sample_id = g.asked_by JOIN tickets t USING (group_id)"
        " GROUP BY s.sample_id HAVING asked > t.asks",
    ),
    Check(
        "tickets",
        "ticket {0} keeps {1} tickets for each sample of its group",
        "SELECT ticket, asks FROM tickets WHERE asks < 0",
    ),
    Check(
        "tickets",
        "{2} tickets were taken, numbered {0} to {1}; the numbers have to start at 0 and leave none out",
        "SELECT MIN(ticket), MAX(ticket), COUNT(*) FROM tickets"
        " HAVING COUNT(*) > 0 AND (MIN(ticket) <> 0 OR MAX(ticket) <> COUNT(*) - 1)",
    ),
    Check(
        "requests",
        "{2} requests were booked, numbered {0} to {1}; the numbers have to start at 0 and leave none out",
        "SELECT MIN(number), MAX(number), COUNT(*) FROM requests"
        " HAVING COUNT(*) > 0 AND (MIN(number) <> 0 OR MAX(number) <> COUNT(*) - 1)",
    ),
    Check(
        "groups",
        "step {0} trained samples of {1} groups, but a batch has {2} at most",
        "SELECT u.step, COUNT(DISTINCT group_id) AS found,"
        f" {AT_STEP.format('groups_per_batch')} AS most"
        " FROM uses u JOIN samples USING (sample_id) WHERE trainer = :main AND u.step >= :since"
        " GROUP BY u.step HAVING found > most",
    ),
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

GROUP_CHECKS = (
    *(*STATES, *TOKENS, *USES, *REUSES, *LOSSES, *VERSIONS),
    *(*SPANS, *REQUESTS, *EPISODES),
    *(*GROUPS, *DERIVED, *TICKETS),
)
"""Whether a group breaks one of them depends on nothing but its own rows, and the tables `steps` and `incarnations`."""
RUN_CHECKS = (*STEPS, *EVALUATIONS)
CHECKS = (*GROUP_CHECKS, *RUN_CHECKS)

"""The audit's rules for requests, episodes and policy spans: the trained tokens are the sampled ones.

A span agrees with a request of its sample if number of tokens, place and digest are equal. Then the ids of the whole
context, the sampled ids, their logprobs and their versions are equal too (flowrl.runtime.ledger.token_digest).

A sample that was not asked turn by turn is booked together with its requests. The requests of an episode are booked by
generators, and the episode by another node, so a run that is in progress, or has failed, may lack some of these rows. A
span that differs from the request at its place is a violation at any time.
"""

from __future__ import annotations

from flowrl.runtime.audit.audit_check import Check
from flowrl.runtime.audit.audit_samples import ENDED

AGREES = "r.sample_id = p.sample_id AND r.digest = p.digest AND r.tokens = p.tokens AND r.context_tokens = p.start"
AT_PLACE = "r.sample_id = p.sample_id AND r.context_tokens = p.start"
IS_EPISODE = "EXISTS (SELECT 1 FROM episodes e WHERE e.sample_id = s.sample_id)"
REPORTED = "(s.generated_s IS NOT NULL OR EXISTS (SELECT 1 FROM requests r WHERE r.sample_id = s.sample_id))"
WHOLE = f"(s.generated_s IS NOT NULL AND NOT {IS_EPISODE} OR {REPORTED} AND {ENDED})"
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
        "tokens in this context: a node has changed ids, policy mask, logprobs or versions after they were sampled",
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
        f" GROUP BY sample_id, trainer, digest, start HAVING times > 1 AND times > {TIMES_SAMPLED}",
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
        "{2} requests were booked, numbered {0} to {1}; the numbers have to start at 0 and leave none out",
        "SELECT MIN(number), MAX(number), COUNT(*) FROM requests"
        " HAVING COUNT(*) > 0 AND (MIN(number) <> 0 OR MAX(number) <> COUNT(*) - 1)",
    ),
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

REQUEST_CHECKS = (*SPANS, *REQUESTS, *EPISODES)

FIGURES = {
    "requests": "SELECT COUNT(*) FROM requests",
    "requests abandoned": "SELECT COUNT(*) FROM requests WHERE abandoned IS NOT NULL",
    "policy spans": "SELECT COUNT(*) FROM spans",
    "policy spans proven": f"SELECT COUNT(*) FROM spans p WHERE EXISTS"
    f" (SELECT 1 FROM requests r WHERE {AGREES} AND r.abandoned IS NULL)",
}

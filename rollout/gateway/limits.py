"""Limits and times of a rollout gateway that have one sensible value."""

from __future__ import annotations

MAX_MESSAGES = 4096
"""Messages in a prompt."""
MAX_MESSAGE_BYTES = 1 << 20
"""Size of one message, in bytes of the contract."""
MAX_PROMPT_BYTES = 4 << 20
"""Size of all messages and tools of a prompt."""
MAX_TOOLS = 256
"""Tools in a prompt."""
MAX_CALLS_PER_ROLLOUT = 64
"""Turns of one rollout in progress; more are refused with RESOURCE_EXHAUSTED."""
MAX_INFLIGHT_BYTES = 512 << 20
"""Sum of the requests in progress, of which a rollout may use an eighth; more are refused with
RESOURCE_EXHAUSTED."""
MAX_WAITING_PROMPTS = 1024
"""Prompts that wait to be rendered and encoded, in each lane; rollouts share it."""
MAX_RENDER_SECONDS = 5.0
"""Processor time in which the chat template renders a prompt once; a template that takes more,
such as one that loops, is ended, and the turn is refused."""
MAX_RENDER_BYTES = 512 << 20
"""Memory in which the chat template renders a prompt; its text may have a sixteenth of it."""
OVERCOMMIT = 1.25
"""Turns a server is given, relative to its slots; above 1 no slot is ever idle."""
POLL_SECONDS = 0.2
"""Time between two status requests to each server."""
DEFAULT_HEARTBEAT_SECONDS = 10.0
"""Longest silence on a stream of a caller that requests no heartbeat interval."""
EJECTION_FAILURES = 3
"""Failed turns after which a rollout server is ejected: it gets no turns for a while, then one
at a time until three have ended well. A good turn makes up for half a failed one. 0: never, and
a turn that one server refuses or answers impossibly fails; else several have to agree."""
EJECTION_SECONDS = 5.0
"""How long a server is ejected; each further time doubles it."""
MAX_EJECTION_SECONDS = 120.0
"""Longest ejection."""
MAX_EJECTED_SHARE = 0.5
"""Share of the servers that may be ejected at once: where most fail, ejecting them does not
help."""
RANKER_SECONDS = 0.5
"""Time that the ranker has to answer; no turn waits for it: means are used until then. A language
model on a CPU needs some tenths of a second for a new prompt."""

"""Rules that find a run which does not learn; the table of docs/observability.md lists them.

Each rule is a function from the run's progress to a finding, or None; `not_learning` asks all of
them, causes first. A run that has solved its tasks has equal rewards, no gradient and little
entropy too: those rules are silent while the reward is at its best after it has risen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

from seamflow.inspect.diagnosis import Finding
from seamflow.inspect.progress import WINDOW, Progress

_FAILING_SHARE, _MIN_FAILURES = 0.5, 8
_CUT_SHARE, _NEARLY_ALL, _CUT_ERRORS = 0.5, 0.9, 5
_ZERO_GRADIENT = 1e-12
_SCALED_TO_NOTHING = 1e-3
_LOGPROB_DISTANCE, _LOGPROB_JUMP = 1.0, 20.0
_NO_ENTROPY = 0.01
_SHORT_SHARE = 0.2
_SUCCESS, _HIGH_SUCCESS, _LONG = "reward/success", 0.9, 10
_BEST_SHARE, _SAME_SHARE = 0.9, 0.1
_TRANSCRIPTS = "`seamflow transcripts --newest 8 --out FILE` shows answers with their rewards"

Rule = Callable[[Progress], Finding | None]


def not_learning(progress: Progress) -> list[Finding]:
    """All findings, causes first; empty: nothing speaks against learning."""
    return [finding for rule in _RULES if (finding := rule(progress)) is not None]


def _tasks_fail(progress: Progress) -> Finding | None:
    failed, tried = progress.num_failed, max(progress.num_tried, progress.num_failed)
    if failed < _MIN_FAILURES or failed < _FAILING_SHARE * tried:
        return None
    return Finding(
        rule="tasks_fail",
        sentence=f"{failed} of {tried} rollouts failed and were not trained on.",
        cure="Mend the agent, its tools or its reward: the terminal and `seamflow why-stuck` name "
        "each cause.",
    )


def _processes_restart(progress: Progress) -> Finding | None:
    """Restarts since the last `WINDOW` steps, or of a run that has made no more."""
    since = progress.all("time", progress.steps[-WINDOW - 1 : -WINDOW])
    recent = [each for each in progress.restarts if not since or each.time > since[0]]
    if not recent:
        return None
    last, names = recent[-1], ", ".join(dict.fromkeys(each.name for each in recent))
    return Finding(
        rule="process_restarted",
        sentence=f"{len(recent)} restarts of {names} in the last {WINDOW} steps; the last one of "
        f"{last.name}, which ended by itself ({last.reason}).",
        cure=f"logs/{last.name}.log in the run's folder says why it ended; work that it had not "
        "recorded is repeated.",
    )


def _answers_are_cut(progress: Progress) -> Finding | None:
    """Cut answers earn clearly less than whole ones; or all are cut, and success, without it the
    reward, has not risen; or nearly all are, and none was ever right."""
    shares, rewards = progress.last("share_cut"), progress.last("reward_cut_mean")
    if not rewards or not shares or min(shares) < _CUT_SHARE:
        return None
    share, cut, mean = fmean(shares), fmean(rewards), fmean(progress.last("reward_mean"))
    success = progress.all(_SUCCESS)
    aim = success or progress.all("reward_mean")
    if share == 1.0:
        is_bad = fmean(aim[-WINDOW:]) <= aim[0] + 1e-9 and not _is_solved(progress)
    else:
        # A difference beyond chance, also where few are whole and many steps are looked at.
        num_whole = (1 - share) * sum(progress.last("num_rollouts") or [WINDOW])
        errors = _CUT_ERRORS / math.sqrt(num_whole)
        beyond = max(fmean(progress.last("reward_std")) * max(errors, 1), 1e-9)
        is_bad = (mean - cut) / (1 - share) >= beyond
    never_right = share >= _NEARLY_ALL and bool(success) and max(success) == 0.0
    if not is_bad and not never_right:
        return None
    return Finding(
        rule="answers_cut",
        sentence=f"{share:.0%} of the rollouts of the last {WINDOW} steps were cut off at a limit "
        f"of tokens; their mean reward is {cut:.3f}, that of all {mean:.3f}.",
        cure="Raise the agent's max_new_tokens (max_tokens), or max_context in [rollout_server]; "
        "or ask for shorter answers.",
    )


def _no_trainable_tokens(progress: Progress) -> Finding | None:
    """A step in which no token is trained on has a batch and no gradient, not even one of 0."""
    steps = progress.steps[-WINDOW:]
    if len(progress.last("num_samples")) < WINDOW or progress.all("grad_norm", steps):
        return None
    return Finding(
        rule="no_trainable_tokens",
        sentence=f"The last {WINDOW} steps had 0 tokens to train on: the weights did not change.",
        cure="Are all answers empty, or cut off while trainer.algorithm.mask_truncated is true? "
        "Raise the limit of tokens, or set mask_truncated to false.",
    )


def _rewards_equal(progress: Progress) -> Finding | None:
    spread, means = progress.last("reward_std"), progress.last("reward_mean")
    is_one_value = bool(spread) and max(spread) == 0.0 and len(set(means)) == 1
    if not is_one_value or _is_solved(progress):
        return None
    return Finding(
        rule="rewards_equal",
        sentence=f"All rewards of the last {WINDOW} steps are {means[-1]:.3f}: no answer is better "
        "than another.",
        cure=f"{_TRANSCRIPTS}: check the reward function; if it is right, take easier tasks, or a "
        "reward that also counts a part of the way.",
    )


def _no_reward_differences(progress: Progress) -> Finding | None:
    shares = progress.last("share_equal_groups")
    is_equal = bool(shares) and min(shares) == 1.0 and _rewards_equal(progress) is None
    wanted = WINDOW * progress.groups_per_step
    if 0 < wanted <= progress.num_equal_discarded:
        seen = f"since the last step, while {progress.num_equal_discarded} groups were discarded"
    elif is_equal and not _is_solved(progress):
        seen = f"in the last {WINDOW} steps"
    else:
        return None
    return Finding(
        rule="no_reward_differences",
        sentence=f"No group had different rewards {seen}: every advantage is 0.",
        cure="Tasks are too hard or too easy, or all answers of a task are the same: raise "
        "group_size or the temperature, change the tasks, or let the reward tell better answers "
        f"from worse ones. {_TRANSCRIPTS}.",
    )


def _gradient_is_zero(progress: Progress) -> Finding | None:
    norms = progress.last("grad_norm")
    is_zero = bool(norms) and max(norms) <= _ZERO_GRADIENT
    has_cause = max(progress.last("share_equal_groups"), default=0.0) == 1.0
    if not is_zero or has_cause or _is_solved(progress):
        return None
    clipped = fmean(progress.last("clip_fraction") or [0.0])
    return Finding(
        rule="gradient_zero",
        sentence=f"The gradient of the last {WINDOW} steps is 0, though groups have different "
        f"rewards; {clipped:.0%} of the tokens are clipped or masked.",
        cure="Check clip_low, clip_high, importance, staleness_decay and loss_aggregation of "
        "[trainer.algorithm], with which no token has a gradient; or the rewards differ by less "
        "than advantage_epsilon: give them a greater scale.",
    )


def _gradient_is_scaled_away(progress: Progress) -> Finding | None:
    scales, norms = progress.last("grad_scale"), progress.last("grad_norm")
    if not scales or not norms or max(scales) >= _SCALED_TO_NOTHING:
        return None
    return Finding(
        rule="gradient_scaled_away",
        sentence=f"The gradient, of norm {fmean(norms):.3g}, is scaled by {fmean(scales):.1g} for "
        f"{WINDOW} steps.",
        cure="Raise trainer.optimizer.max_grad_norm; if the norm is not usual for the model, lower "
        "trainer.optimizer.learning_rate or the rewards' scale.",
    )


def _logprobs_apart(progress: Progress) -> Finding | None:
    """One step is enough if the distance is beyond all reason."""
    found = progress.all("train_rollout_logprob_abs_diff", progress.steps[-WINDOW:])
    is_lasting = len(found) == WINDOW and min(found) >= _LOGPROB_DISTANCE
    if not is_lasting and max(found, default=0.0) < _LOGPROB_JUMP:
        return None
    return Finding(
        rule="logprobs_apart",
        sentence=f"Log-probs of server and trainer are {max(found):.3g} nats a token apart: "
        "answers are sampled from another policy than the one that is trained.",
        cure="Lower trainer.optimizer.learning_rate, or max_staleness in [launcher]; if the very "
        "first step had this too, model, dtype or temperature of the two differ.",
    )


def _entropy_collapsed(progress: Progress) -> Finding | None:
    found = progress.last("entropy")
    if not found or max(found) >= _NO_ENTROPY or _is_at_its_best(progress):
        return None
    first = progress.all("entropy")[0]
    return Finding(
        rule="entropy_collapsed",
        sentence=f"The policy's entropy is {found[-1]:.2g} nats a token ({first:.2g} in the first "
        "step): it says the same again and again, and cannot find anything better.",
        cure="Go back to an earlier checkpoint, with a lower learning_rate, a higher clip_high, or "
        "a KL to a reference (`reference` in [launcher], trainer.kl.loss).",
    )


def _length_collapsed(progress: Progress) -> Finding | None:
    found = progress.last("completion_tokens_mean")
    if not found or len(progress.steps) < WINDOW + 1 or _is_at_its_best(progress):
        return None
    first = progress.all("completion_tokens_mean")[0]
    if max(found) >= _SHORT_SHARE * first:
        return None
    return Finding(
        rule="length_collapsed",
        sentence=f"Answers have {found[-1]:.1f} tokens on average, {first:.1f} in the first step, "
        "and the reward has not risen with that.",
        cure="The reward pays for short answers, or training has diverged: check the reward of an "
        f"empty answer, or lower learning_rate. {_TRANSCRIPTS}.",
    )


def _heldout_below_start(progress: Progress) -> Finding | None:
    """The whole 95 % interval of the newest evaluation is worse than the first mean."""
    if len(progress.evaluations) < 2:
        return None
    first, newest = progress.evaluations[0], progress.evaluations[-1]
    sign = -1.0 if newest.get("goal") == "min" else 1.0
    ends = [sign * each for each in newest.get("interval") or (newest["mean"],)]
    if max(ends) >= sign * first["mean"]:
        return None
    return Finding(
        rule="heldout_below_start",
        sentence=f"Held-out {newest.get('metric', 'reward')} is {newest['mean']:.3f} at step "
        f"{newest['step']}, below the {first['mean']:.3f} of the first evaluation.",
        cure="The reward in training pays for something else than the metric, or training has "
        "diverged: compare both (evaluation_samples.jsonl), or lower learning_rate.",
    )


def _reward_without_success(progress: Progress) -> Finding | None:
    """The trained reward has risen beyond chance, and success has not risen at all.

    In the steps, or in the newest evaluation against the first, where its metric is no success.
    """
    risen = _risen_evaluation(progress) or _risen_steps(progress)
    if risen is None:
        return None
    (first, last), (before, after) = risen
    if after > before or after >= _HIGH_SUCCESS:
        return None
    return Finding(
        rule="reward_without_success",
        sentence=f"The reward rose from {first:.3f} to {last:.3f}, and success went from "
        f"{before:.1%} to {after:.1%}: the reward pays right and wrong answers alike.",
        cure=f"{_TRANSCRIPTS}: let the reward pay more for what counts as success (reward_weights "
        "of [trainer.algorithm]), and less for a part of the way.",
    )


_Risen = tuple[tuple[float, float], tuple[float, float]]
"""First and last reward, first and last success."""


def _risen_steps(progress: Progress) -> _Risen | None:
    rewards, success = progress.all("reward_mean"), progress.all(_SUCCESS)
    if len(rewards) < _LONG or len(success) != len(rewards):
        return None
    first, last = fmean(rewards[:WINDOW]), fmean(rewards[-WINDOW:])
    spread = fmean(progress.last("reward_std") or [math.inf])
    # Three standard errors of a difference of two means.
    number = sum(progress.last("num_rollouts") or [WINDOW])
    if last - first <= 3 * spread * math.sqrt(2 / number):
        return None
    return (first, last), (fmean(success[:WINDOW]), fmean(success[-WINDOW:]))


def _risen_evaluation(progress: Progress) -> _Risen | None:
    passed = [e for e in progress.evaluations if "1" in (e.get("pass_at") or {})]
    if len(passed) < 2 or passed[0].get("metric") == "success":
        return None
    first, newest = passed[0], passed[-1]
    if newest.get("goal") == "min" or (newest.get("interval") or [-math.inf])[0] <= first["mean"]:
        return None
    rates = first["pass_at"]["1"], newest["pass_at"]["1"]
    return (first["mean"], newest["mean"]), rates


def _is_solved(progress: Progress) -> bool:
    """Whether the reward is at its best, about the same for all tasks, after groups differed."""
    means = progress.all("reward_mean")
    rise = max(means, default=0.0) - min(means, default=0.0)
    is_same = max(progress.last("reward_std"), default=0.0) <= _SAME_SHARE * rise
    return _is_at_its_best(progress) and is_same


def _is_at_its_best(progress: Progress) -> bool:
    """Whether the reward is at its best after it has risen, and groups once had differences."""
    means = progress.all("reward_mean")
    lowest, highest = min(means, default=0.0), max(means, default=0.0)
    rise = highest - lowest
    if rise <= 0 or fmean(means[-WINDOW:]) < lowest + _BEST_SHARE * rise:
        return False
    earlier = progress.all("share_equal_groups", progress.steps[:-WINDOW])
    return not earlier or min(earlier) < 1.0


_RULES: tuple[Rule, ...] = (
    _processes_restart,
    _tasks_fail,
    _answers_are_cut,
    _no_trainable_tokens,
    _logprobs_apart,
    _rewards_equal,
    _no_reward_differences,
    _gradient_is_scaled_away,
    _gradient_is_zero,
    _entropy_collapsed,
    _length_collapsed,
    _heldout_below_start,
    _reward_without_success,
)

"""What the API says of recorded rollouts, against a real store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lib.console.support import TOKEN, group, world
from tests.lib.trajectory_manager.client import message


async def test_a_list_has_filters_and_pages(redis_url: str) -> None:
    """Newest first; pages follow each other without gaps."""
    async with world(redis_url) as shown:
        first = await group(shown.client, "one", 1.0, 0.0)
        second = await group(shown.client, "two", 0.5, 0.5)
        page = await shown.get("rollouts", limit=3)
        names = [row["rollout_id"] for row in page["rows"]]
        rest = await shown.get("rollouts", limit=3, cursor=page["next"])
        names += [row["rollout_id"] for row in rest["rows"]]
        assert set(names[:2]) == set(second) and set(names[2:]) == set(first)
        assert rest["next"] is None and rest["searched"] == rest["total"] == 4
        best = await shown.get("rollouts", reward_min=0.9)
        assert [row["reward"] for row in best["rows"]] == [1.0]
        assert (await shown.get("rollouts", state="failed"))["rows"] == []
        assert len((await shown.get("rollouts", group="one"))["rows"]) == 2


async def test_text_is_searched(redis_url: str) -> None:
    """Without a tokenizer ids stand for text; control: a text that nothing has."""
    async with world(redis_url) as shown:
        await group(shown.client, "one", 1.0, 0.0)
        assert len((await shown.get("rollouts", text="3 4"))["rows"]) == 2
        assert (await shown.get("rollouts", text="4 3"))["rows"] == []


async def test_a_row_has_the_prompt_and_the_answer(redis_url: str) -> None:
    """Also in a group of a step; a rollout without a recorded prompt has its task."""
    async with world(redis_url) as shown:
        await group(shown.client, "one", 1.0)
        await shown.client.submit("two", payload_json='{"question":"why"}')
        lease = await shown.client.lease()
        while lease.task.task_id != "two":
            lease = await shown.client.lease()
        await shown.client.start(lease.rollout_id, lease.lease_token)
        rows = (await shown.get("rollouts"))["rows"]
        texts = [(row["purpose"], row["prompt"], row["answer"]) for row in rows]
        assert texts == [("train", '{"question":"why"}', None), ("train", "1 2", "6")]
        running = await shown.get(f"rollouts/{lease.rollout_id}")
        assert (running["task"], running["turns"]) == ('{"question":"why"}', [])
        begun = await shown.client.begin(lease.rollout_id, "t1", [7])
        await shown.client.append(lease.rollout_id, "t1", begun.epoch, 0, message([7]))
        rows = (await shown.get("rollouts", state="running"))["rows"]
        assert [row["prompt"] for row in rows] == ["7"]


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [("state", "ended", "finished"), ("reward_min", "much", ""), ("failure", "x", "timeout")],
)
async def test_a_wrong_filter_is_named_with_its_cure(
    redis_url: str, name: str, value: str, known: str
) -> None:
    """Field, value, cure."""
    async with world(redis_url) as shown:
        status, answer = await shown.ask("rollouts", **{name: value})
        assert status == 400
        assert name in answer["error"]["message"] and value in answer["error"]["message"]
        assert known in answer["error"]["cure"]


async def test_a_rollout_has_turns_parts_and_its_group(redis_url: str) -> None:
    """Parts cover what a turn adds; places count in its whole sequence."""
    async with world(redis_url) as shown:
        name, other = await group(shown.client, "one", 1.0, 0.0)
        whole = await shown.get(f"rollouts/{name}")
        assert [turn["turn_id"] for turn in whole["turns"]] == ["t1", "t2"]
        second = whole["turns"][1]
        assert (second["prefix_turn"], second["prefix_length"], second["num_tokens"]) == (
            "t1",
            4,
            6,
        )
        places = [(p["role"], p["start"], p["count"], p["text"]) for p in second["parts"]]
        assert places == [("user", 4, 1, "5 "), ("assistant", 5, 1, "6 ")]
        assert {each["rollout_id"] for each in whole["group"]["members"]} == {name, other}
        assert whole["rewards"] == [{"name": "reward", "value": 1.0, "turn_id": None}]


async def test_a_window_of_tokens_is_of_the_whole_sequence(redis_url: str) -> None:
    """Prefix included, each token with its origin; nothing was trained."""
    async with world(redis_url) as shown:
        name, _ = await group(shown.client, "one", 1.0, 0.0)
        window = await shown.get(f"rollouts/{name}/tokens", turn="t2", start=1, count=4)
        assert (window["start"], window["total"]) == (1, 6)
        assert window["ids"] == [2, 3, 4, 5]
        assert window["origin"] == "eppe"
        assert window["logprob"] == [None, -0.5, -0.5, None]
        assert window["server"] == [None, "server-1", "server-1", None]
        assert window["train_logprob"] == window["advantage"] == [None] * 4
        assert window["trained"] == [0] * 4
        end = await shown.get(f"rollouts/{name}/tokens", turn="t2", start=99, count=4)
        assert end["ids"] == [] and end["total"] == 6


async def test_what_is_not_there_is_said(redis_url: str) -> None:
    """Runs, rollouts, turns."""
    async with world(redis_url) as shown:
        (name, _) = await group(shown.client, "one", 1.0, 0.0)
        for path in ("rollouts/none", f"rollouts/{name}/tokens?turn=none"):
            status, answer = await shown.ask(path)
            assert status == 404 and answer["error"]["cure"], path


async def test_a_run_has_what_its_folder_has(redis_url: str, tmp_path: Path) -> None:
    """Note, logs, and time of all its lives; control: a log of another name."""
    times = (("started", 10), ("stopped", 20), ("started", 50), ("finished", 70))
    lines = (json.dumps({"state": state, "time": time}) + "\n" for state, time in times)
    (tmp_path / "lives.jsonl").write_text("".join(lines))
    (tmp_path / "note.txt").write_text("twice the rate\n#rate")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer.log").write_text("it began\n")
    async with world(redis_url, run_folder=tmp_path) as shown:
        overview = await shown.get("overview")
        assert overview["note"] == "twice the rate #rate"
        assert (await shown.get("steps"))["stops"] == [[20, 50]]
        (log,) = (await shown.get("logs"))["logs"]
        assert (log["name"], log["bytes"]) == ("trainer", 9)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        url = f"{shown.url}/api/runs"
        async with shown.http.get(url, headers=headers) as listed:
            row = (await listed.json())["runs"][0]
        assert (row["started"], row["seconds"]) == (10, 30)
        path = f"{url}/{shown.client.run_id}/logs/trainer"
        async with shown.http.get(path, headers=headers) as read:
            assert (read.content_type, await read.text()) == ("text/plain", "it began\n")
        async with shown.http.get(path) as refused:
            assert refused.status == 401
        assert (await shown.ask("logs/none"))[0] == 404


async def test_services_that_do_not_answer_are_waited_for(redis_url: str) -> None:
    """The first screen is there, and names each of them with its error and what to do."""
    async with world(redis_url) as shown:
        answer = await shown.get("overview")
        waits = {wait["for"]: wait for wait in answer["waiting"] if wait["for"]}
        assert {"scheduler", "trainer"} <= waits.keys()
        assert waits["scheduler"]["last_error"] and waits["scheduler"]["next_action"]


async def test_a_page_that_follows_hears_of_rollouts(redis_url: str) -> None:
    """When the stream is closed its follower is removed."""
    async with world(redis_url) as shown:
        url = f"{shown.url}/api/runs/{shown.client.run_id}/events"
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with shown.http.get(url, headers=headers) as stream:
            heard, kind, played = dict[str, dict[str, object]](), "", list[str]()
            async for line in stream.content:
                name, _, value = line.decode().strip().partition(": ")
                kind = value if name == "event" else kind
                if name == "data":
                    heard[kind] = json.loads(value)
                if name == "data" and list(heard) == ["status"] and not played:
                    played = await group(shown.client, "one", 1.0, 0.0)
                if "rollout" in heard:
                    break
        assert heard["status"]["state"] in ("running", "waiting")
        assert heard["rollout"]["rollout_id"] in played

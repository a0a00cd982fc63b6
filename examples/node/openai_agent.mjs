// The tool agent of ../openai_agent.py in Node: the openai SDK for the model, fetch for the rollouts.
//
//   npm install --prefix examples/node
//   seamflow train --config examples/openai_agent.toml --agent-command "node examples/node/openai_agent.mjs"
//
// To start it yourself, on any machine with this folder:
//
//   SEAMFLOW_HTTP_GATEWAY=http://127.0.0.1:8080 node examples/node/openai_agent.mjs

import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

import OpenAI from "openai";

const GATEWAY = process.env.SEAMFLOW_HTTP_GATEWAY ?? "http://127.0.0.1:8080";
const TOKEN = process.env.SEAMFLOW_AGENT_TOKEN ?? "";
const PARALLEL = 48;
const MAX_TURNS = 4;
const DELAYS = [500, 1000, 2000, 4000, 8000, 8000, 8000];

const RIDE = {
  name: "ride",
  description: "Ride the lift; it answers with the next call.",
  parameters: {
    type: "object",
    properties: {
      floors: { type: "string", description: 'Every floor to pass, the called one last: "13 14 15".' },
    },
    required: ["floors"],
  },
};

// One rollout after the other, until the run ends.
async function work() {
  for (let number = 0; ; ) {
    // A repeated request with the same id leases nothing twice.
    const request = { wait_seconds: 20, request_id: randomUUID() };
    const reply = await post("/rollouts/lease", request, TOKEN);
    if (!reply.ok) throw new Error(`no lease: ${reply.status} ${await reply.text()}`);
    const { rollouts, empty_reason: reason } = await reply.json();
    if (reason === "run_ended") return number;
    for (const rollout of rollouts) {
      await run(rollout);
      number += 1;
    }
  }
}

async function run(rollout) {
  let end;
  try {
    end = { rewards: await ride(rollout) };
  } catch (error) {
    // The rollout is replaced by another one.
    end = { failure: { class: "infrastructure", message: String(error).slice(0, 1000) } };
    console.log(`rollout ${rollout.rollout_id} failed: ${error}`);
    await sleep(1000);
  }
  const path = `/rollouts/${encodeURIComponent(rollout.rollout_id)}/finish`;
  const reply = await post(path, end, rollout.credential);
  // Not ok is for example 409: its lease was lost, or the run has ended.
  if (!reply.ok) console.log(`rollout ${rollout.rollout_id} was not finished: ${await reply.text()}`);
}

// Let the model ride until it answers without a tool call; returns the rewards.
async function ride({ base_url: baseURL, credential, task }) {
  const policy = new OpenAI({ baseURL, apiKey: credential });
  const lift = new Lift(task.payload);
  const messages = [{ role: "user", content: lift.call() }];
  for (let turn = 0; turn < MAX_TURNS; turn += 1) {
    const answer = await policy.chat.completions.create({
      model: "policy",
      messages,
      tools: [{ type: "function", function: RIDE }],
      max_completion_tokens: 96,
    });
    const { message } = answer.choices[0];
    messages.push(message);
    for (const call of message.tool_calls ?? []) {
      const result = lift.ride(JSON.parse(call.function.arguments).floors);
      messages.push({ role: "tool", tool_call_id: call.id, content: result });
    }
    if (!message.tool_calls?.length) break;
  }
  return lift.rewards();
}

// The lift of one task, as in ../quickstart/lift.py and ../quickstart/task.py.
class Lift {
  constructor({ start, calls }) {
    this.stops = [start, ...calls];
    this.rides = [];
  }

  call() {
    const turn = this.rides.length;
    if (turn >= this.stops.length - 1) return "idle";
    const [here, there] = this.stops.slice(turn, turn + 2);
    return `at ${floorName(here)} ${there > here ? "up" : "down"} to ${floorName(there)}`;
  }

  ride(floors) {
    this.rides.push(String(floors).split(/\s+/).filter(Boolean));
    return this.call();
  }

  rewards() {
    const paths = this.stops.slice(1).map((stop, turn) => path(this.stops[turn], stop));
    const shares = paths.map((right, turn) => share(right, this.rides[turn] ?? []));
    const success = this.rides.length === paths.length && shares.every((each) => each === 1);
    const mean = shares.reduce((sum, each) => sum + each, 0) / shares.length;
    return { reward: 0.5 * mean + 0.5 * Number(success), success: Number(success) };
  }
}

function path(here, there) {
  const step = there > here ? 1 : -1;
  return Array.from({ length: Math.abs(there - here) }, (_, i) => floorName(here + step * (i + 1)));
}

// Share of the right prefix in the longer one of both.
function share(right, given) {
  const wrong = right.findIndex((floor, i) => floor !== given[i]);
  return (wrong < 0 ? right.length : wrong) / Math.max(right.length, given.length);
}

function floorName(floor) {
  return String(floor).padStart(2, "0");
}

// One call of the HTTP gateway, repeated while it is busy, restarting or out of reach.
async function post(path, body, key) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const send = () => fetch(GATEWAY + path, { method: "POST", headers, body: JSON.stringify(body) });
  for (const delay of DELAYS) {
    try {
      const reply = await send();
      if (reply.status !== 429 && reply.status < 500) return reply;
      await reply.body?.cancel();
    } catch {
      // Not reached: repeated below.
    }
    await sleep(delay);
  }
  return send();
}

const numbers = await Promise.all(Array.from({ length: PARALLEL }, work));
const sum = numbers.reduce((total, number) => total + number, 0);
console.log(`the run has ended after ${sum} rollouts of this agent`);

// What the official Node SDKs get from a served run; prints {"checks", "failed"} as its last line.
//
//   node tests/suites/agents/node/sdk_checks.mjs http://127.0.0.1:8080

import assert from "node:assert/strict";

import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const GATEWAY = process.argv[2];
const ASK = [{ role: "user", content: "at 12 up to 15" }];
const NEXT = "at 15 up to 17";
const PARAMETERS = { type: "object", properties: { floors: { type: "string" } }, required: ["floors"] };
const RIDE = { name: "ride", description: "Ride the lift.", parameters: PARAMETERS };
const SAMPLING = { model: "policy", temperature: 0.2 };
const CHAT = { ...SAMPLING, tools: [{ type: "function", function: RIDE }], max_completion_tokens: 96 };
const RESPONSES = { ...SAMPLING, tools: [{ type: "function", ...RIDE, strict: false }], max_output_tokens: 96 };
const MESSAGES = {
  ...SAMPLING,
  tools: [{ name: RIDE.name, description: RIDE.description, input_schema: PARAMETERS }],
  max_tokens: 96,
};

// The second turn begins with all tokens of the first.
function continues(first, second, numTokens) {
  assert.equal(second.seamflow.prefix_turn_id, first.seamflow.turn_id);
  assert.equal(second.seamflow.prefix_length, numTokens);
}

// Loses the first reply after the server has sent it.
function cutOnce() {
  let requests = 0;
  const cut = async (url, init) => {
    requests += 1;
    if (requests > 1) return fetch(url, init);
    return fetch(url, { ...init, signal: AbortSignal.timeout(20) }); // while its turn is sampled
  };
  return { cut, seen: () => requests };
}

const checks = {
  async chat({ openai }) {
    const first = await openai().chat.completions.create({ ...CHAT, messages: ASK });
    const { message, finish_reason: reason } = first.choices[0];
    assert.equal(reason, "tool_calls");
    const [call] = message.tool_calls;
    assert.ok(JSON.parse(call.function.arguments).floors);
    const result = { role: "tool", tool_call_id: call.id, content: NEXT };
    const second = await openai().chat.completions.create({ ...CHAT, messages: [...ASK, message, result] });
    continues(first, second, first.usage.total_tokens);
  },

  async chatStream({ openai }) {
    const stream = openai().chat.completions.stream({ ...CHAT, messages: ASK });
    const final = await stream.finalChatCompletion();
    assert.ok(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments).floors);
  },

  async responses({ openai }) {
    const first = await openai().responses.create({ ...RESPONSES, input: ASK });
    const call = first.output.at(-1);
    assert.equal(call.type, "function_call");
    const result = { type: "function_call_output", call_id: call.call_id, output: NEXT };
    const second = await openai().responses.create({ ...RESPONSES, input: [...ASK, ...first.output, result] });
    continues(first, second, first.usage.total_tokens);
  },

  async responsesStream({ openai }) {
    const stream = openai().responses.stream({ ...RESPONSES, input: ASK });
    const final = await stream.finalResponse();
    assert.equal(final.output.at(-1).type, "function_call");
  },

  async messages({ anthropic }) {
    const first = await anthropic().messages.create({ ...MESSAGES, messages: ASK });
    assert.equal(first.stop_reason, "tool_use");
    const result = { type: "tool_result", tool_use_id: first.content.at(-1).id, content: NEXT };
    const messages = [
      ...ASK,
      { role: "assistant", content: first.content },
      { role: "user", content: [result] },
    ];
    const second = await anthropic().messages.create({ ...MESSAGES, messages });
    continues(first, second, first.usage.input_tokens + first.usage.output_tokens);
  },

  async messagesStream({ anthropic }) {
    const final = await anthropic().messages.stream({ ...MESSAGES, messages: ASK }).finalMessage();
    assert.equal(final.content.at(-1).type, "tool_use");
  },

  async models({ openai, anthropic }) {
    const [model] = (await openai().models.list()).data;
    const [same] = (await anthropic().models.list()).data;
    assert.equal(model.id, same.id);
    assert.ok(model.max_model_len > 0);
  },

  async errors({ openai, anthropic }) {
    const chat = (client, more) => client.chat.completions.create({ ...CHAT, messages: ASK, ...more });
    await assert.rejects(chat(openai(), { n: 2 }), (error) => error instanceof OpenAI.BadRequestError && error.param === "n");
    const messages = [{ role: "user", content: "at 12 up to 15 ".repeat(2000) }];
    await assert.rejects(chat(openai(), { messages }), (error) => error.code === "context_length_exceeded");
    await assert.rejects(chat(openai({ apiKey: "wrong" })), OpenAI.AuthenticationError);
    const wrong = anthropic({ apiKey: "wrong" });
    await assert.rejects(wrong.messages.create({ ...MESSAGES, messages: ASK }), Anthropic.AuthenticationError);
  },

  async late({ openai, rollout }) {
    const headers = { "content-type": "application/json", "x-api-key": rollout.credential };
    const finish = `${rollout.anthropic_base_url}/finish`;
    const reply = await fetch(finish, { method: "POST", headers, body: '{"rewards": 1}' });
    assert.equal(reply.status, 200);
    const call = openai().chat.completions.create({ ...CHAT, messages: ASK });
    await assert.rejects(call, OpenAI.ConflictError);
  },

  async retries({ openai, anthropic }) {
    const first = cutOnce();
    const client = openai({ fetch: first.cut });
    const chat = await client.chat.completions.create({ ...CHAT, messages: ASK });
    assert.ok(chat.id);
    assert.equal(first.seen(), 2);
    const second = cutOnce();
    const message = await anthropic({ fetch: second.cut }).messages.create({ ...MESSAGES, messages: ASK });
    assert.ok(message.id);
    assert.equal(second.seen(), 2);
  },
};

const failed = [];
for (const [name, check] of Object.entries(checks)) {
  const headers = { "content-type": "application/json" };
  const reply = await fetch(`${GATEWAY}/rollouts`, { method: "POST", headers, body: "{}" });
  const rollout = await reply.json();
  const openai = (more) => new OpenAI({ baseURL: rollout.base_url, apiKey: rollout.credential, ...more });
  const anthropic = (more) =>
    new Anthropic({ baseURL: rollout.anthropic_base_url, apiKey: rollout.credential, ...more });
  try {
    await check({ rollout, openai, anthropic });
  } catch (error) {
    failed.push(`${name}: ${String(error).slice(0, 300)}`);
  }
}
console.log(JSON.stringify({ checks: Object.keys(checks).length, failed }));

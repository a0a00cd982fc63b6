// AI SDK: generateText with tools on its default model (Responses, stored), and generateObject.

import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const [baseURL, apiKey] = process.argv.slice(2);
const model = createOpenAI({ baseURL, apiKey })("policy");

const settings = {
  model,
  temperature: 0,
  stopWhen: stepCountIs(5),
  tools: {
    add: tool({
      description: "Add two numbers.",
      inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
      execute: async ({ a, b }) => a + b,
    }),
    weather: tool({
      description: "Tell the weather in a city.",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => `sunny in ${city}`,
    }),
  },
};
const question = { role: "user", content: "What is 2 + 3, and how is the weather in Ulm?" };
const { text, response } = await generateText({ ...settings, messages: [question] });
// The answer's text goes back as a reference to its item.
const next = { role: "user", content: "Say it again." };
const again = await generateText({ ...settings, messages: [question, ...response.messages, next] });
if (again.text !== text) throw new Error(`${again.text} is not ${text}`);
const { object } = await generateObject({
  model,
  temperature: 0,
  prompt: "Report the sum and the weather in Ulm.",
  schema: z.object({ total: z.number().int(), weather: z.string() }),
});
console.log(JSON.stringify({ answer: text, report: object }));

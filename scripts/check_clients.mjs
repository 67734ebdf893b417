// Sessions of npm's clients with a server: tools and a schema in one request, whole and streamed.
//   node check_clients.mjs URL FOLDER       FOLDER has the packages in node_modules
// Prints each part that passed; throws at the first answer that is not in order.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import process from "node:process";

const [, , url, folder] = process.argv;
const found = createRequire(pathToFileURL(`${folder}/package.json`));
const load = async (name) => import(pathToFileURL(found.resolve(name)).href);

const { default: OpenAI } = await load("openai");
const { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } = await load("openai/helpers/zod");
const { default: Anthropic } = await load("@anthropic-ai/sdk");
const { zodOutputFormat } = await load("@anthropic-ai/sdk/helpers/zod");
const { betaZodTool } = await load("@anthropic-ai/sdk/helpers/beta/zod");
const agents = await load("@openai/agents");
const ai = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { z } = await load("zod");

const City = z.object({ name: z.enum(["Oslo", "Rome"]), size: z.enum(["small", "large"]) });
const Place = z.object({ city: z.enum(["Bonn", "Kiel"]) });
const ASKED = [{ role: "user", content: "Which city?" }];
const SEEDS = [...Array(8).keys()];
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });

const ONE_CALL = { // a request's bound on calls, in the names of each provider
  openai: { parallelToolCalls: false }, vnext: { parallel_tool_calls: false }, anthropic: { disableParallelToolUse: true },
};
globalThis.AI_SDK_LOG_WARNINGS = false;

// What the answers of several seeds were: the model chooses between call and schema, and each was seen.
class Seen {
  calls = 0;
  texts = 0;
  call(parsed) {
    Place.parse(parsed);
    this.calls += 1;
  }
  text(parsed) {
    City.parse(parsed);
    this.texts += 1;
  }
  both() {
    assert.ok(this.calls && this.texts, `calls ${this.calls}, texts ${this.texts}`);
  }
}

async function openaiChat() {
  const seen = new Seen();
  const fixed = {
    model: "demo", messages: ASKED, max_tokens: 200, temperature: 0.7, parallel_tool_calls: false,
    tools: [zodFunction({ name: "weather", parameters: Place })], response_format: zodResponseFormat(City, "City"),
  };
  for (const seed of SEEDS) {
    const whole = (await openai.chat.completions.parse({ ...fixed, seed })).choices[0].message;
    const streamed = (await openai.chat.completions.stream({ ...fixed, seed }).finalChatCompletion()).choices[0].message;
    const pick = (message) => [message.tool_calls?.map((call) => call.function.arguments) ?? [], message.content || null];
    assert.deepEqual(pick(streamed), pick(whole));
    for (const message of [whole, streamed])
      for (const call of message.tool_calls ?? []) seen.call(call.function.parsed_arguments);
    if (!whole.tool_calls?.length) [whole, streamed].forEach((message) => seen.text(message.parsed));
  }
  seen.both();
}

async function openaiResponses() {
  const seen = new Seen();
  const fixed = {
    model: "demo", input: ASKED, max_output_tokens: 200, temperature: 0.7, parallel_tool_calls: false,
    tools: [zodResponsesFunction({ name: "weather", parameters: Place })], text: { format: zodTextFormat(City, "City") },
  };
  for (const seed of SEEDS) {
    const whole = await openai.responses.parse({ ...fixed, seed });
    const streamed = await openai.responses.stream({ ...fixed, seed }).finalResponse();
    const pick = (response) => response.output.map((item) => item.arguments ?? item.content[0].text);
    assert.deepEqual(pick(streamed), pick(whole));
    for (const response of [whole, streamed]) {
      const calls = response.output.filter((item) => item.type === "function_call");
      for (const call of calls) seen.call(call.parsed_arguments);
      if (!calls.length) seen.text(response.output_parsed);
    }
  }
  seen.both();
}

async function openaiRunTools() {
  let asked = 0;
  const weather = zodFunction({
    name: "weather", parameters: Place, function: (place) => (Place.parse(place), (asked += 1), "rain"),
  });
  for (const stream of [false, true])
    for (const seed of SEEDS.slice(0, 4)) {
      const runner = openai.chat.completions.runTools(
        { model: "demo", messages: ASKED, max_tokens: 200, seed, tools: [weather], parallel_tool_calls: false, stream,
          response_format: zodResponseFormat(City, "City") },
        { maxChatCompletions: 8 },
      );
      const last = await runner.finalMessage();
      if (!last.tool_calls?.length) City.parse(JSON.parse(last.content));
    }
  assert.ok(asked);
}

async function anthropicMessages() {
  const seen = new Seen();
  const tools = [{ name: "weather", input_schema: { type: "object", ...z.toJSONSchema(Place) } }];
  const fixed = {
    model: "demo", messages: ASKED, max_tokens: 200, temperature: 0.7, tools,
    tool_choice: { type: "auto", disable_parallel_tool_use: true }, output_config: { format: zodOutputFormat(City) },
  };
  for (const seed of SEEDS) {
    const whole = await anthropic.messages.parse({ ...fixed, seed });
    const streamed = await anthropic.messages.stream({ ...fixed, seed }).finalMessage();
    const pick = (message) => message.content.map((block) => block.input ?? block.text);
    assert.deepEqual(pick(streamed), pick(whole));
    const calls = whole.content.filter((block) => block.type === "tool_use");
    for (const call of calls) seen.call(call.input);
    if (!calls.length) [whole, streamed].forEach((message) => seen.text(message.parsed_output));
    assert.equal(whole.stop_reason, calls.length ? "tool_use" : "end_turn");
  }
  seen.both();
}

async function anthropicToolRunner() {
  let asked = 0;
  const weather = betaZodTool({
    name: "weather", description: "d", inputSchema: Place, run: (place) => (Place.parse(place), (asked += 1), "rain"),
  });
  for (const [stream, seed] of SEEDS.flatMap((seed) => [[false, seed], [true, seed]])) {
    const runner = anthropic.beta.messages.toolRunner({
      model: "demo", messages: ASKED, max_tokens: 200, tools: [weather], max_iterations: 6, stream, seed,
      tool_choice: { type: "auto", disable_parallel_tool_use: true },
      output_config: { format: { type: "json_schema", schema: zodOutputFormat(City).schema } },
    });
    const last = await runner.runUntilDone();
    const text = last.content.filter((block) => block.type === "text");
    if (last.stop_reason === "end_turn") City.parse(JSON.parse(text[0].text));
  }
  assert.ok(asked);
}

async function openaiAgents() {
  agents.setTracingDisabled(true);
  for (const Model of [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
    for (const stream of [false, true]) {
      let asked = 0;
      const weather = agents.tool({
        name: "weather", description: "d", parameters: Place, execute: (place) => (Place.parse(place), (asked += 1), "rain"),
      });
      for (const toolChoice of ["required", "auto"])
        for (const seed of SEEDS.slice(0, 3)) {
          const agent = new agents.Agent({
            name: "Clerk", instructions: "Short.", model: new Model(openai, "demo"), tools: [weather], outputType: City,
            modelSettings: { toolChoice, maxTokens: 200, temperature: 0.7, parallelToolCalls: false, providerData: { seed } },
          });
          try {
            const ran = await agents.run(agent, "Which city?", { stream, maxTurns: 6 });
            if (stream) for await (const _ of ran);
            await ran.completed;
            City.parse(ran.finalOutput);
          } catch (error) {
            if (!(error instanceof agents.MaxTurnsExceededError)) throw error;
          }
        }
      assert.ok(asked >= 3, `${Model.name} ${stream} ${asked}`);
    }
}

async function aiSdk() {
  const provided = {
    responses: createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" })("demo"),
    chat: createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).chat("demo"),
    compatible: createOpenAICompatible({ name: "vnext", baseURL: `${url}/v1`, supportsStructuredOutputs: true })("demo"),
    plain: createOpenAICompatible({ name: "vnext", baseURL: `${url}/v1` })("demo"),
    anthropic: createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("demo"),
    anthropicNew: createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("claude-sonnet-4-5"),
  };
  for (const [name, model] of Object.entries(provided)) await aiSdkOf(name, model);
}

async function aiSdkOf(name, model) {
  let asked = 0;
  const weather = ai.tool({ description: "d", inputSchema: Place, execute: (place) => (Place.parse(place), (asked += 1), "rain") });
  const common = { model, maxRetries: 0, maxOutputTokens: 250, temperature: 0.7, prompt: "Which city?", providerOptions: ONE_CALL };
  const withTools = { ...common, tools: { weather }, stopWhen: ai.stepCountIs(6) };
  let texts = 0;
  const forced = ({ stepNumber }) => (stepNumber === 0 ? { toolChoice: "required" } : { toolChoice: "none" });
  for (const seed of SEEDS.slice(0, 3)) {
    const schema = name === "plain" ? {} : { output: ai.Output.object({ schema: City }) };
    for (const prepareStep of name === "anthropic" ? [undefined] : [undefined, forced]) {
      const whole = await ai.generateText({ ...withTools, seed, prepareStep, ...schema });
      if (whole.finishReason === "stop" && name !== "plain") City.parse(whole.output), (texts += 1);
      const stream = ai.streamText({ ...withTools, seed, prepareStep, ...schema, onError: ({ error }) => { throw error; } });
      for await (const part of stream.fullStream) assert.notEqual(part.type, "error", String(part.error));
      if ((await stream.finishReason) === "stop" && name !== "plain") City.parse(await stream.output), (texts += 1);
    }
    if (name === "plain") continue;
    City.parse((await ai.generateObject({ ...common, seed, schema: City })).object);
    const objects = ai.streamObject({ ...common, seed, schema: City });
    for await (const _ of objects.partialObjectStream);
    City.parse(await objects.object);
  }
  // "anthropic" sends the schema as one more tool and no seed, so chance says whether it is called: generateObject shows it above
  assert.ok(asked && (texts || name === "plain" || name === "anthropic"), `${name}: ${asked} calls, ${texts} texts`);
}

for (const session of [openaiChat, openaiResponses, openaiRunTools, anthropicMessages, anthropicToolRunner, openaiAgents, aiSdk]) {
  await session();
  console.log(`ok ${session.name}`);
}

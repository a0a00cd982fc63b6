// An environment of seamflow from protos/ alone: guess the number that the seed chose, in three answers.
//   node environment.js [--port 50070] [--max-episodes 64]
const { createHash } = require('node:crypto');
const { parseArgs } = require('node:util');
const grpc = require('@grpc/grpc-js');

const { values: options } = parseArgs({ options: {
  port: { type: 'string', default: '50070' }, 'max-episodes': { type: 'string', default: '64' } } });
const MAX_EPISODES = Number(options['max-episodes']), HIGHEST = 9, MAX_ANSWERS = 3;
const contract = require('@grpc/proto-loader').loadSync(
  ['seamflow/environment/v1/environment_service.proto', 'seamflow/common/v1/error.proto'],
  { includeDirs: [`${__dirname}/../../../protos`], keepCase: true, longs: String, enums: String, defaults: true });
const { EnvironmentService } = grpc.loadPackageDefinition(contract).seamflow.environment.v1;
const { ALREADY_EXISTS, FAILED_PRECONDITION, INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED } = grpc.status;
const episodes = new Map(); // episode_id -> { request, response, number, answers, step }

// A failed call with its reason, and the seconds after which to repeat it, as error.proto says.
function failure(code, reason, message, retrySeconds) {
  const detail = (kind, value) => ({ type_url: `type.googleapis.com/google.rpc.${kind}`,
    value: contract[`seamflow.common.v1.${kind}`].serialize(value) });
  const details = [detail('ErrorInfo', { reason, domain: 'seamflow' })];
  if (retrySeconds) details.push(detail('RetryInfo', { retry_delay: { seconds: retrySeconds } }));
  const metadata = new grpc.Metadata();
  metadata.set('grpc-status-details-bin', contract['seamflow.common.v1.Status'].serialize({ code, message, details }));
  return Object.assign(new Error(message), { code, details: message, metadata });
}
const user = (text) => ({ role: 'user', content: [{ type: 'text', text }] });
const reward = (value) => ({ name: 'reward', value });

function chosen(seed, task_id) { // equal seeds and tasks choose equal numbers
  return createHash('sha256').update(`${seed} ${task_id}`).digest().readUInt32BE() % HIGHEST + 1;
}

function answer(episode, message) {
  const text = message.content.map((part) => part.text).join('').trim(), last = ++episode.answers === MAX_ANSWERS;
  if (text === String(episode.number)) return { rewards: [reward(1)], is_done: true };
  const hint = /^[1-9]$/.test(text) ? (Number(text) < episode.number ? 'higher' : 'lower') : 'Answer with a number.';
  return { messages: [user(hint)], rewards: [reward(0)], is_truncated: last };
}

const calls = {
  Describe: () => ({ name: 'guess', kind: 'ENVIRONMENT_KIND_STEPPED', max_episodes: MAX_EPISODES, is_seeded: true }),
  ListTasks: () => ({}), // it takes any task
  Reset(request) {
    const { episode_id, task, seed } = request, content = JSON.stringify(request);
    if (!episode_id) throw failure(INVALID_ARGUMENT, 'INVALID_FIELD', 'episode_id is empty: send a unique name');
    if (!episodes.has(episode_id)) {
      if (episodes.size >= MAX_EPISODES)
        throw failure(RESOURCE_EXHAUSTED, 'TOO_MANY_REQUESTS', `all ${MAX_EPISODES} episodes are taken`, 1);
      const number = chosen(seed, task.task_id);
      const response = { messages: [user(`Guess a number from 1 to 9. It is not ${number % HIGHEST + 1}.`)] };
      episodes.set(episode_id, { content, response, number, answers: 0, step: null });
    }
    const episode = episodes.get(episode_id);
    if (episode.content !== content)
      throw failure(ALREADY_EXISTS, 'ALREADY_EXISTS', `episode ${episode_id} already exists with different content`);
    return episode.response;
  },
  Step(request) {
    const { episode_id, step_index, message } = request, episode = episodes.get(episode_id);
    if (!episode) throw failure(NOT_FOUND, 'NOT_FOUND', `episode ${episode_id} does not exist: reset it again`);
    const { step } = episode, content = JSON.stringify(request), next = step ? step.index + 1 : 0;
    if (step && step.index === step_index) { // a repeated call gets the answer of the first
      if (step.content === content) return step.response;
      throw failure(ALREADY_EXISTS, 'ALREADY_EXISTS', `step ${step_index} already exists with different content`);
    }
    if (step_index !== next)
      throw failure(FAILED_PRECONDITION, 'STEP_OUT_OF_ORDER', `step_index is ${step_index}: the next is ${next}`);
    if (step && (step.response.is_done || step.response.is_truncated))
      throw failure(FAILED_PRECONDITION, 'WRONG_STATE', 'the episode ended before this step: reset another one');
    episode.step = { index: step_index, content, response: answer(episode, message) };
    return episode.step.response;
  },
  Close({ episode_id }) {
    episodes.delete(episode_id);
    return {};
  },
};

const server = new grpc.Server({ 'grpc.max_receive_message_length': 64 << 20,
  'grpc.http2.min_ping_interval_without_data_ms': 5000, 'grpc.keepalive_permit_without_calls': 1 });
server.addService(EnvironmentService.service, Object.fromEntries(Object.entries(calls).map(([name, call]) =>
  [name, ({ request }, reply) => { try { reply(null, call(request)); } catch (error) { reply(error); } }])));
server.bindAsync(`127.0.0.1:${options.port}`, grpc.ServerCredentials.createInsecure(), (error, port) => {
  if (error) throw error;
  console.log(JSON.stringify({ port }));
});
process.on('SIGTERM', () => server.tryShutdown(() => process.exit(0)));

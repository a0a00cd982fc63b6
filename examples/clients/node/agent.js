// An agent of seamflow from protos/ alone: it plays the quickstart's lift task in leased rollouts until the run ends.
//   [CONCURRENCY=16] [TOKEN=...] [TOKEN_LOG=FILE] node agent.js HOST:PORT RUN
const fs = require('node:fs');
const { setTimeout: sleep } = require('node:timers/promises');
const grpc = require('@grpc/grpc-js');

const [address, run_id] = process.argv.slice(2);
const { CONCURRENCY = '16', TOKEN = '', TOKEN_LOG = '/dev/null' } = process.env;
const { UNAVAILABLE, ABORTED, NOT_FOUND } = grpc.status;
const contract = require('@grpc/proto-loader').loadSync(
  ['seamflow/rollout/v1/rollout_service.proto', 'seamflow/common/v1/error.proto'],
  { includeDirs: [`${__dirname}/../../../protos`], keepCase: true, longs: String, enums: String, defaults: true });
const { RolloutService } = grpc.loadPackageDefinition(contract).seamflow.rollout.v1;
const gateway = new RolloutService(address, grpc.credentials.createInsecure(), { // with TLS: createSsl(...)
  'grpc.max_receive_message_length': 64 << 20, 'grpc.max_send_message_length': 64 << 20,
  'grpc.initial_reconnect_backoff_ms': 100, 'grpc.max_reconnect_backoff_ms': 1000, 'grpc.keepalive_time_ms': 10_000 });
const tokenLog = fs.openSync(TOKEN_LOG, 'a');
const held = new Map(); // rollout_id -> rollout whose lease is extended
const summary = { rollouts: 0, failed: 0, resumed: 0 };

const seconds = (duration) => Number(duration.seconds) + duration.nanos / 1e9;
const broken = (text) => Object.assign(new Error(text), { code: UNAVAILABLE });
const bearer = (token) => grpc.Metadata.fromHttp2Headers(token ? { authorization: `Bearer ${token}` } : {});

// Adds to a failed call what its details say: reason, fields at fault, seconds after which to repeat it.
function decode(failure) {
  const parse = (name, bytes) => contract[`seamflow.common.v1.${name}`].deserialize(bytes);
  const [trailer] = failure.metadata?.get('grpc-status-details-bin') ?? [];
  for (const { type_url, value } of trailer ? parse('Status', trailer).details : []) {
    const kind = type_url.split('/google.rpc.')[1];
    if (kind === 'ErrorInfo') failure.reason = parse(kind, value).reason;
    if (kind === 'BadRequest') failure.fields = parse(kind, value).field_violations.map(({ field }) => field);
    if (kind === 'RetryInfo') failure.retryAfter = seconds(parse(kind, value).retry_delay);
  }
  return failure;
}

// Repeats a call, ever more slowly, as long as the contract says that a repeat may succeed.
const retrying = (call, codes = [UNAVAILABLE], delay = 0.1) => call().catch(async (failure) => {
  const { code, retryAfter } = decode(failure);
  if (!codes.includes(code) && retryAfter === undefined) throw failure;
  await sleep(1000 * Math.max(retryAfter ?? 0, delay * (0.5 + Math.random() / 2)));
  return retrying(call, codes, Math.min(2 * delay, 2));
});
const unary = (method, request, token = TOKEN, codes = undefined) => retrying(() => new Promise((resolve, reject) =>
  gateway[method]({ run_id, ...request }, bearer(token), { deadline: Date.now() + 75_000 },
    (failure, response) => (failure ? reject(failure) : resolve(response)))), codes);

// One turn to its end, resumed where its stream broke; with `breaks` it breaks once, on purpose.
function generate(rollout, turn, breaks = false) {
  const { rollout_id, credential } = rollout, { turn_id } = turn;
  let received = 0;
  return retrying(async () => {
    const request = { run_id, rollout_id, ...turn, resume_from_offset: received };
    const stream = gateway.Generate(request, bearer(credential), { deadline: Date.now() + 3_600_000 });
    rollout.stream = stream.on('error', () => {}); // the loop throws it too, except for what comes after a break
    if (received) summary.resumed++;
    for await (const { chunk, end } of stream) {
      if (end) return end;
      if (!chunk) continue; // a heartbeat
      const { offset, tokens } = chunk;
      const spans = tokens.spans.map((s) => [s.start, s.num_tokens, Number(s.weight_version), s.server_id]);
      fs.writeSync(tokenLog, `${JSON.stringify({ rollout_id, turn_id, offset, ...tokens, spans })}\n`);
      if (offset !== received) throw new Error(`the chunk has offset ${offset}, and ${received} were received`);
      received += tokens.token_ids.length;
      if (breaks) { breaks = false; stream.cancel(); throw broken('on purpose'); }
    }
    throw broken('the stream ended before the turn: the gateway drains');
  }, [UNAVAILABLE, ABORTED]);
}

// The quickstart's task: name each floor on the way to each call. Returns the mean share of right ones.
async function play(rollout, breaks) {
  const { start, calls } = JSON.parse(rollout.task.payload_json), messages = [], shares = [];
  const floor = (number) => String(number).padStart(2, '0');
  for (const [i, there] of calls.entries()) {
    const here = i ? calls[i - 1] : start, step = Math.sign(there - here);
    const text = `at ${floor(here)} ${step > 0 ? 'up' : 'down'} to ${floor(there)}`;
    messages.push({ role: 'user', content: [{ type: 'text', text }] });
    const turn = { turn_id: `turn-${i}`, messages: { messages }, sampling: { max_new_tokens: 96 } };
    messages.push((await generate(rollout, turn, breaks && i > 0)).message);
    const said = messages.at(-1).content.map((part) => part.text).join('').split(' ');
    const right = Array.from({ length: Math.abs(there - here) }, (_, k) => floor(here + step * (k + 1)));
    shares.push(right.filter((name, k) => name === said[k]).length / Math.max(right.length, said.length));
  }
  return shares.reduce((sum, share) => sum + share) / shares.length;
}

// Works on one rollout after the other until the run ends. The first one shows a refused call and a broken stream.
async function work() {
  for (;;) {
    const request = { request_id: crypto.randomUUID(), agent_id: 'node', wait: { seconds: 20 } };
    const { leases: [rollout], empty_reason } = await unary('LeaseRollouts', request, TOKEN, [UNAVAILABLE, NOT_FOUND]);
    if (empty_reason === 'EMPTY_REASON_RUN_ENDED') return;
    if (!rollout) continue;
    const { rollout_id, credential } = rollout, first = !summary.rollouts++;
    held.set(rollout_id, rollout);
    const wrong = { turn_id: 'refused', token_ids: { token_ids: [1] }, sampling: { temperature: -1 } };
    if (first) await generate(rollout, wrong).catch(({ code, reason, fields, details: text }) =>
      Object.assign(summary, { refusal: { code, reason, fields, text } }));
    const outcome = await play(rollout, first).then((value) => ({ rewards: { rewards: [{ name: 'reward', value }] } }),
      ({ message }) => ({ failure: { failure_class: 'FAILURE_CLASS_INFRASTRUCTURE', message } })); // it is replaced
    await unary('FinishRollout', { rollout_id, ...outcome }, credential).catch(console.error); // its lease was lost
    if (outcome.failure) summary.failed++;
    held.delete(rollout_id);
  }
}

// Extends all leases together, every third of their duration. A lost rollout's stream is cancelled, which ends it.
async function extend() {
  for (let delay = 1; ; await sleep(1000 * delay)) {
    if (!held.size) continue;
    const { lost_rollout_ids, lease_duration } = await unary('ExtendRollouts', { rollouts: [...held.values()] });
    lost_rollout_ids.forEach((id) => held.get(id)?.stream?.cancel());
    delay = seconds(lease_duration) / 3;
  }
}
extend();
Promise.all(Array.from({ length: Number(CONCURRENCY) }, work))
  .then(() => { console.log(JSON.stringify(summary)); process.exit(); });

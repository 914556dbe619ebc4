// Devices, the queue, and how the service itself is.

import { bytes, duration, fill, h, note, number, pill, when } from './dom.js';
import { call, get, repeat } from './api.js';

export function devicesView() {
  const cards = h('dl', { class: 'facts card' });
  const health = h('div', { role: 'status' });
  const running = h('tbody');
  const queue = h('tbody');
  const version = h('p', { class: 'told' });
  const table = (names, body) => h('div', { class: 'card scroll' }, h('table', {}, h('thead', {}, h('tr', {}, names.map((name) => h('th', { scope: 'col' }, name)))), body));
  const element = h('section', { 'aria-labelledby': 'title' }, h('div', { class: 'row head' }, h('h1', { id: 'title' }, 'Devices and queue')), health, cards,
    h('h2', {}, 'In use'), table(['Devices', 'Job', 'Status', 'Memory', 'CPU', 'Speed', 'Left'], running), h('h2', {}, 'Queue'), table(['Place', 'Job', 'Priority', 'Wants', 'Waiting since'], queue), version);
  return { title: 'Devices', element, start(signal) {
    repeat(2000, signal, async () => {
      const [numbers, live, ready] = await Promise.all([gauges(signal), jobs(['launching', 'running', 'stopping'], signal), readiness(signal)]);
      const queued = await jobs(['queued'], signal);
      drawFacts(cards, numbers);
      const faults = Object.entries(ready?.checks ?? {}).filter(([, what]) => what !== 'ok');
      fill(health, faults.map(([name, what]) => h('div', { class: 'box bad', role: 'alert' }, h('strong', {}, name), ` ${what}`)));
      fill(running, live.map(runningRow), live.length ? null : empty(7, 'Nothing runs.'));
      fill(queue, queued.toSorted((a, b) => (a.queue_position ?? 1e9) - (b.queue_position ?? 1e9)).map(queuedRow), queued.length ? null : empty(5, 'Nothing waits.'));
    }, (error) => note(error.message, 'bad'));
    get('version', {}, signal).then((found) => fill(version, `posttrain ${found.version} · Python ${found.python}`, Object.entries(found.trainer?.packages ?? {}).map(([name, number]) => (number ? ` · ${name} ${number}` : '')))).catch(() => fill(version, 'The version could not be asked for.'));
  } };
}

const empty = (columns, text) => h('tr', {}, h('td', { colspan: columns, class: 'told' }, text));
const link = (job) => h('td', { class: 'name' }, h('a', { href: `#/jobs/${encodeURIComponent(job.job_uuid)}` }, job.name ?? job.job_uuid), h('small', {}, job.model));

async function jobs(status, signal) { return (await get('post_training/jobs', { status, limit: 100 }, signal)).data; }

async function readiness(signal) {
  try { return await get('health/ready', {}, signal); } catch (error) { if (error.status === 503) return error.body; throw error; }
}

// Gauges of /metrics as {name: value or {label: value}}.
export function parse(text) {
  const found = {};
  for (const line of text.split('\n')) {
    const match = /^posttrain_([A-Za-z0-9_]+)(?:\{([^}]*)\})? ([-+0-9.eE]+)$/.exec(line);
    if (!match) continue;
    const label = /="((?:[^"\\]|\\.)*)"/.exec(match[2] ?? '');
    if (label) (found[match[1]] ??= {})[label[1]] = Number(match[3]);
    else found[match[1]] = Number(match[3]);
  }
  return found;
}

async function gauges(signal) { return parse(await (await call('GET', 'metrics', { headers: { accept: 'text/plain' }, signal })).text()); }

function drawFacts(place, numbers) {
  const of = (name) => numbers.jobs?.[name] ?? 0;
  const devices = numbers.devices ?? numbers.slots_total;
  const busy = numbers.devices_busy ?? numbers.slots_total - numbers.slots_free;
  const facts = [['Devices', number(devices)], ['Busy', number(busy)], ['Free', number(devices - busy)], ['Running', number(of('running'))], ['Queued', number(of('queued'))], ['Paused', number(of('paused'))], ['Free disk', bytes(numbers.disk_free_bytes)]];
  fill(place, facts.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value))));
}

function runningRow(job) {
  const used = job.resources_allocated ?? {};
  return h('tr', {}, h('td', {}, (used.devices ?? []).map((name) => h('span', { class: 'tag' }, name))), link(job), h('td', {}, pill(job.status)), h('td', {}, used.rss_bytes ? bytes(used.rss_bytes) : '–'),
    h('td', {}, used.cpu_percent == null ? '–' : `${number(used.cpu_percent, 3)} %`), h('td', {}, job.progress?.tokens_per_s ? `${number(job.progress.tokens_per_s, 3)} tokens/s` : '–'), h('td', {}, duration(job.progress?.eta_s ?? NaN)));
}

function queuedRow(job) {
  const wants = job.spec?.resources?.devices;
  return h('tr', {}, h('td', {}, number(job.queue_position)), link(job), h('td', {}, number(job.priority)), h('td', {}, Array.isArray(wants) ? wants.join(', ') : String(wants ?? 1)), h('td', {}, when(job.created_at)));
}

// One job: how far it is, what can be done with it, and its curves, log, events, checkpoints and spec.

import { ago, ask, bar, button, bytes, duration, fill, h, note, number, pill, say, setBar, when } from './dom.js';
import { download, get, jobPath, post, remove, repeat } from './api.js';
import { Board, follow } from './charts.js';
import { LogView } from './log.js';
import { specPanel } from './spec.js';

const TABS = [['charts', 'Charts'], ['log', 'Log'], ['events', 'Events'], ['checkpoints', 'Checkpoints'], ['spec', 'Spec']];
const ENDED = new Set(['succeeded', 'failed', 'cancelled']);

const VERBS = {
  pause: { in: ['queued', 'launching', 'running'], label: 'Pause', title: 'Pause this job?', text: 'It saves a checkpoint and stops; the devices are free for others. It goes on from there when it is resumed.' },
  resume: { in: ['paused'], label: 'Resume', kind: 'primary', title: 'Resume this job?', text: 'It is queued again and goes on from its newest checkpoint.' },
  retry: { in: ['failed', 'cancelled'], label: 'Retry', kind: 'primary', title: 'Try this job again?', text: 'A new attempt is queued. It goes on from the newest checkpoint, if there is one.' },
  cancel: { in: ['queued', 'launching', 'running', 'stopping', 'paused'], label: 'Cancel', kind: 'danger', title: 'Cancel this job?', text: 'It is stopped at once, without saving. Checkpoints that it has made stay.' },
  delete: { in: ['succeeded', 'failed', 'cancelled'], label: 'Delete', kind: 'danger', title: 'Delete this job?', text: 'Its checkpoints, logs and metrics are removed from the server, and cannot be brought back.' },
};

export function jobView([uuid, tab = 'charts']) {
  const head = h('div', { class: 'row head' });
  const facts = h('dl', { class: 'facts card' });
  const trouble = h('div');
  const progress = bar(0, 'Progress of the job');
  const told = h('p', { class: 'told' }); // changes too often to be read out each time
  const tabs = h('nav', { class: 'tabs', 'aria-label': 'Parts of the job' }, TABS.map(([name, label]) => h('a', { href: `#/jobs/${encodeURIComponent(uuid)}/${name}`, 'aria-current': name === tab ? 'page' : null }, label)));
  const panel = h('div', { class: 'panel' });
  const element = h('section', { 'aria-labelledby': 'title' }, head, h('div', { class: 'progress' }, progress, told), trouble, facts, tabs, panel);
  let shown = null;
  let opened = null;

  async function act(verb) {
    const { label, title, text, kind } = VERBS[verb];
    if (!(await ask({ title, text, ok: label, kind: kind ?? 'primary' }))) return;
    if (verb === 'delete') { await remove(jobPath(uuid)); note('The job was deleted.'); location.hash = '#/jobs'; return; }
    draw(await post(jobPath(uuid, `/${verb}`)));
  }

  function draw(job) {
    const key = JSON.stringify([job.status, job.reason, job.name, job.attempt, job.error, job.warnings]);
    if (key !== shown) {
      shown = key;
      const verbs = Object.entries(VERBS).filter(([, verb]) => verb.in.includes(job.status)).map(([name, verb]) => button(verb.label, () => act(name), { kind: verb.kind ?? '' }));
      fill(head, h('a', { class: 'back', href: '#/jobs', 'aria-label': 'All jobs' }, '←'), h('div', { class: 'names' }, h('h1', { id: 'title' }, job.name ?? job.job_uuid), h('small', { class: 'mono' }, job.job_uuid)), pill(job.status), h('span', { class: 'grow' }), h('a', { class: 'btn', href: `#/new?from=${encodeURIComponent(uuid)}` }, 'New from this'), verbs);
      fill(trouble, faults(job));
      progress.className = `bar big s-${job.status}`;
    }
    const done = job.progress ?? {};
    setBar(progress, job.status === 'succeeded' ? 100 : done.percent ?? 0);
    say(told, sentence(job, done));
    const texts = factsOf(job, done);
    const same = facts.childElementCount === texts.length && texts.every(([name], at) => facts.children[at].firstChild.textContent === name);
    if (!same) fill(facts, texts.map(([name]) => h('div', {}, h('dt', {}, name), h('dd', {}, ''))));
    texts.forEach(([, value], at) => { const cell = facts.children[at].lastChild; if (value instanceof Node) fill(cell, value); else say(cell, value); });
  }

  return { title: `Job ${uuid}`, element, start(signal) {
    repeat(1500, signal, async () => {
      const job = await get(jobPath(uuid), {}, signal);
      document.title = `${job.progress?.percent && job.status === 'running' ? `${Math.round(job.progress.percent)} % ` : ''}${job.name ?? uuid} · posttrain`;
      draw(job);
      if (opened === null || (opened.attempt !== job.attempt && job.attempt > 0)) {
        opened?.stop.abort();
        opened = { attempt: job.attempt, stop: new AbortController(), seen: null };
        signal.addEventListener('abort', () => opened.stop.abort());
        PANELS[tab in PANELS ? tab : 'charts'](job, panel, opened.stop.signal);
      }
      return ENDED.has(job.status) ? 10000 : 1500;
    }, (error) => { say(told, error.message); if (error.status === 404) fill(panel); });
  } };
}

function sentence(job, done) {
  if (job.status === 'queued') return job.queue_position ? `Number ${job.queue_position} in the queue.` : 'Waiting.';
  if (job.status === 'launching') return 'Starting its processes…';
  const steps = done.total_steps ? `Step ${number(done.step)} of ${number(done.total_steps)}` : done.phase ? `Phase: ${done.phase}` : '';
  const parts = [steps, done.epoch ? `epoch ${number(done.epoch, 3)}` : '', done.percent != null ? `${number(done.percent, 3)} %` : ''];
  if (job.status === 'running') parts.push(done.phase && done.total_steps && done.phase !== 'train' ? `now: ${done.phase}` : '', done.eta_s ? `about ${duration(done.eta_s)} left` : '');
  else if (job.reason && job.reason !== job.status) parts.push(job.reason.replaceAll('_', ' '));
  return parts.filter(Boolean).join(' · ') || job.status;
}

function factsOf(job, done) {
  const { dataset, training } = job.spec ?? {};
  const used = job.resources_allocated ?? {};
  const end = job.completed_at ? Date.parse(job.completed_at) : Date.now();
  const known = [
    ['Model', job.model], ['Method', `${job.method}${training?.lora ? ` · LoRA, rank ${training.lora.rank}` : ' · all weights'}`],
    ['Data', dataset ? `${dataset.filename ?? 'rows in the request'} · ${number(dataset.report?.rows)} rows` : '–'],
    ['Created', when(job.created_at)], ['Time', job.started_at ? duration((end - Date.parse(job.started_at)) / 1000) : '–'],
    ['Loss', number(job.metrics?.loss)], ['Validation', job.metrics?.validation_loss == null ? null : number(job.metrics.validation_loss)],
    ['Speed', done.tokens_per_s ? `${number(done.tokens_per_s, 3)} tokens/s` : null], ['Tokens', done.tokens_seen ? number(done.tokens_seen) : null],
    ['Devices', used.devices?.length ? used.devices.join(', ') : null], ['Memory', used.rss_bytes ? `${bytes(used.rss_bytes)} · ${number(used.cpu_percent, 3)} % CPU` : null],
    ['Attempt', job.attempt > 1 ? String(job.attempt) : null], ['Priority', job.priority ? String(job.priority) : null],
    ['Removed', job.expires_at ? when(job.expires_at) : null], ...(job.trackers ?? []).map((one) => [one.kind === 'wandb' ? 'W&B' : 'MLflow', h('a', { href: one.url, target: '_blank', rel: 'noopener noreferrer' }, 'open')]),
    ['Result', job.fine_tuned_model && h('code', {}, job.fine_tuned_model)],
  ];
  return known.filter(([, value]) => value !== null && value !== undefined);
}

function faults(job) {
  const boxes = [];
  if (job.error) {
    const lines = job.error.errors?.length ? h('ul', {}, job.error.errors.slice(0, 50).map((one) => h('li', {}, one.line ? `line ${one.line}: ` : '', one.message))) : null;
    boxes.push(h('div', { class: 'box bad', role: 'alert' }, h('strong', {}, job.error.message ?? job.error.code), job.error.rank != null && h('span', { class: 'tag' }, `rank ${job.error.rank}`), lines,
      job.error.log_tail && h('details', {}, h('summary', {}, 'End of its log'), h('pre', {}, job.error.log_tail))));
  }
  if (job.warnings?.length) boxes.push(h('details', { class: 'box warn' }, h('summary', {}, `${job.warnings.length} ${job.warnings.length === 1 ? 'remark' : 'remarks'}`), h('ul', {}, job.warnings.map((text) => h('li', {}, text)))));
  return boxes;
}

const PANELS = { charts: chartsPanel, log: logPanel, events: eventsPanel, checkpoints: checkpointsPanel, spec: (job, panel) => fill(panel, specPanel(job)) };

async function chartsPanel(job, panel, signal) {
  const board = new Board(signal);
  const csv = button('CSV', () => download(jobPath(job.job_uuid, '/metrics'), `${job.job_uuid}.csv`, 'text/csv'), { kind: 'small', glyph: 'down', title: 'All points as a file' });
  const pick = h('select', { 'aria-label': 'Compare with', onchange: () => overlay(pick.value) }, h('option', { value: '' }, 'Compare with…'));
  fill(board.extra, pick, csv);
  fill(panel, board.element);
  await follow(job, board, signal);
  const recent = await get('post_training/jobs', { limit: 50 }, signal);
  const others = recent.data.filter((one) => one.job_uuid !== job.job_uuid);
  pick.append(...others.map((one) => h('option', { value: one.job_uuid }, `${one.name ?? one.job_uuid} · ${one.status}`)));
  pick.append(h('option', { value: '-' }, 'Alone again'));
  async function overlay(uuid) {
    pick.value = '';
    if (uuid === '-') [...board.runs.keys()].filter((id) => id !== job.job_uuid).forEach((id) => board.drop(id));
    else if (uuid) await follow(others.find((one) => one.job_uuid === uuid), board, signal);
  }
}

function logPanel(job, panel, signal) {
  const view = new LogView(job, signal);
  fill(panel, view.element);
  return view.open();
}

function eventsPanel(job, panel, signal) {
  const list = h('ol', { class: 'events card', reversed: true });
  fill(panel, list);
  let after = null;
  repeat(2000, signal, async () => {
    const page = await get(jobPath(job.job_uuid, '/events'), { after, limit: 500, order: 'asc' }, signal);
    for (const event of page.data) {
      after = event.id;
      const data = Object.keys(event.data ?? {}).length ? h('details', {}, h('summary', {}, 'Details'), h('pre', {}, JSON.stringify(event.data, null, 2))) : null;
      list.prepend(h('li', { class: `l-${event.level}` }, h('time', { datetime: event.created_at, title: ago(event.created_at) }, new Date(event.created_at).toLocaleString()), h('span', { class: 'tag' }, event.type), h('div', {}, event.message, data)));
    }
    return page.has_more ? 0 : 2000;
  }, (error) => note(error.message, 'bad'));
}

function checkpointsPanel(job, panel, signal) {
  const body = h('tbody');
  const told = h('p', { class: 'told' });
  const names = ['Checkpoint', 'Epoch', 'Loss', 'Validation', 'Size', 'Made', ''];
  fill(panel, h('div', { class: 'card scroll' }, h('table', {}, h('thead', {}, h('tr', {}, names.map((name) => h('th', { scope: 'col' }, name)))), body)), told);
  let shown = '';
  repeat(3000, signal, async () => {
    const { data } = await get(jobPath(job.job_uuid, '/checkpoints'), { limit: 1000 }, signal);
    say(told, data.length ? 'The download is a tar file; its folder model/ is what people load.' : 'No checkpoint is complete yet.');
    const key = JSON.stringify(data.map((one) => [one.id, one.best]));
    if (key === shown) return 3000;
    shown = key;
    fill(body, data.toReversed().map((one) => checkpointRow(job, one)));
    return 3000;
  }, (error) => say(told, error.message));
}

function checkpointRow(job, one) {
  const path = jobPath(job.job_uuid, `/checkpoints/${one.id}`);
  const drop = async () => {
    if (await ask({ title: `Delete ${one.id}?`, text: 'Its files are removed from the server.', ok: 'Delete', kind: 'danger' })) await remove(path);
  };
  const files = h('details', {}, h('summary', {}, `${one.files.length} files`), h('ul', { class: 'files' }, one.files.map((file) => {
    const at = `${path}/files/${file.path.split('/').map(encodeURIComponent).join('/')}`;
    return h('li', {}, h('a', { href: at, onclick: (event) => { event.preventDefault(); download(at, file.path.split('/').pop()); } }, file.path), h('small', {}, bytes(file.size_bytes)));
  })));
  const result = job.fine_tuned_model ?? `ft:${job.model}:posttrain::${job.job_uuid}`;
  const further = `#/new?model=${encodeURIComponent(`${result}:ckpt-step-${one.step}`)}`;
  return h('tr', {}, h('td', { class: 'name' }, h('strong', {}, one.id), one.best && h('span', { class: 'tag set' }, 'best'), h('span', { class: 'tag' }, one.kind), files),
    h('td', {}, number(one.epoch, 3)), h('td', {}, number(one.metrics?.loss)), h('td', {}, number(one.metrics?.validation_loss)), h('td', {}, bytes(one.size_bytes)), h('td', {}, when(one.created_at)),
    h('td', {}, h('div', { class: 'row end' }, h('a', { class: 'btn small', href: further, title: 'A new job that starts from this checkpoint' }, 'Train on'),
      button('Download', () => download(`${path}/archive`, `${job.job_uuid}-${one.id}.tar`), { kind: 'small', glyph: 'down' }), ENDED.has(job.status) && button('Delete', drop, { kind: 'small danger' }))));
}

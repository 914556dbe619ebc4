// The list of jobs: live, filtered by state on the server, searched here over as many pages as it takes.

import { ago, bar, button, duration, fill, h, note, number, pill, setBar } from './dom.js';
import { get, repeat } from './api.js';

const FILTERS = [['all', 'All', []], ['active', 'Active', ['queued', 'launching', 'running', 'stopping', 'paused']], ['running', 'Running', ['running']], ['queued', 'Queued', ['queued']], ['paused', 'Paused', ['paused']],
  ['succeeded', 'Succeeded', ['succeeded']], ['failed', 'Failed', ['failed']], ['cancelled', 'Cancelled', ['cancelled']]];
const PAGE = 50;
const SEARCHED = 1000;
const LIVE = new Set(['queued', 'launching', 'running', 'stopping']);
const WHOLE_MS = 6000;

export function jobsView(query) {
  const state = { filter: query.get('status') ?? 'all', words: query.get('q') ?? '', pages: 1, picked: new Set(), rows: new Map(), more: false };
  const body = h('tbody');
  const told = h('p', { class: 'told', role: 'status' });
  const more = button('Older jobs', () => { state.pages += 1; refresh(); }, { kind: 'hidden' });
  const compare = button('Compare', () => { location.hash = `#/compare?jobs=${[...state.picked].map(encodeURIComponent).join(',')}`; }, { kind: 'hidden' });
  const search = h('input', { type: 'search', placeholder: 'Name, id, model, note…  ( / )', 'aria-label': 'Search jobs', value: state.words, oninput: () => { state.words = search.value; remember(); refresh(); } });
  const tabs = FILTERS.map(([name, label]) => button(label, () => { state.filter = name; state.pages = 1; remember(); mark(); refresh(); }, { kind: 'chip' }));
  const table = h('table', { class: 'jobs' }, h('thead', {}, h('tr', {}, h('th', { class: 'pick' }, h('span', { class: 'sr' }, 'Compare')), ...['Job', 'Status', 'Model', 'Progress', 'Loss', 'Time', 'Created'].map((name) => h('th', { scope: 'col' }, name)))), body);
  const element = h('section', { 'aria-labelledby': 'title' },
    h('div', { class: 'row head' }, h('h1', { id: 'title' }, 'Jobs'), h('span', { class: 'grow' }), compare, h('a', { class: 'btn primary', href: '#/new' }, 'New job')),
    h('div', { class: 'row tools' }, h('div', { class: 'chips', role: 'group', 'aria-label': 'Status' }, tabs), h('span', { class: 'grow' }), search),
    h('div', { class: 'card scroll' }, table), told, h('div', { class: 'row' }, more));
  let signal = null;
  let turn = 0;
  mark();

  function mark() { tabs.forEach((tab, at) => tab.setAttribute('aria-pressed', String(FILTERS[at][0] === state.filter))); }
  function remember() {
    const kept = new URLSearchParams();
    if (state.filter !== 'all') kept.set('status', state.filter);
    if (state.words) kept.set('q', state.words);
    history.replaceState(null, '', `${location.pathname}${location.search}#/jobs${kept.size ? `?${kept}` : ''}`);
  }

  // Each time the live jobs alone are asked for; all of the list when one came or went, and now and then.
  let whole = 0;
  let lived = '';
  async function look() {
    if (Date.now() - whole > WHOLE_MS) { await refresh(); return; }
    const page = await get('post_training/jobs', { limit: 100, status: [...LIVE] }, signal);
    const ids = new Set(page.data.map((job) => job.job_uuid));
    const key = [...ids].join();
    const gone = [...body.children].some((element) => LIVE.has(element.className) && !ids.has(element.dataset.job));
    if (gone || key !== lived) { lived = key; await refresh(); return; }
    for (const job of page.data) state.rows.get(job.job_uuid)?.update(job);
  }

  async function refresh() {
    whole = Date.now();
    const mine = ++turn;
    const states = (FILTERS.find(([name]) => name === state.filter) ?? FILTERS[0])[2];
    const words = state.words.toLowerCase().split(/\s+/).filter(Boolean);
    const limit = words.length ? 100 : PAGE;
    const found = [];
    let after = null;
    let seen = 0;
    let pages = 0;
    for (;;) {
      const page = await get('post_training/jobs', { limit, after, status: states }, signal);
      if (mine !== turn || signal.aborted) return;
      seen += page.data.length;
      found.push(...page.data.filter((job) => words.every((word) => haystack(job).includes(word))));
      pages += 1;
      after = page.last_id;
      state.more = page.has_more;
      if (!page.has_more || (words.length ? found.length >= PAGE * state.pages || seen >= SEARCHED * state.pages : pages >= state.pages)) break;
    }
    draw(found, words.length ? seen : null);
  }

  function draw(jobs, searched) {
    const rows = jobs.map((job) => {
      const row = state.rows.get(job.job_uuid) ?? newRow(job, state, () => compare.classList.toggle('hidden', state.picked.size < 2));
      state.rows.set(job.job_uuid, row);
      row.update(job);
      return row.element;
    });
    if (rows.length !== body.children.length || rows.some((row, at) => body.children[at] !== row)) body.replaceChildren(...rows);
    more.classList.toggle('hidden', !state.more);
    if (jobs.length) fill(told, searched === null ? '' : `${jobs.length} of the newest ${searched} jobs.`);
    else if (searched !== null) fill(told, `None of the newest ${searched} jobs has these words.`);
    else if (state.filter !== 'all') fill(told, 'No job is in this state.');
    else fill(told, 'No jobs yet. ', h('a', { href: '#/new' }, 'Make the first one'), ', or run ', h('code', {}, 'posttrain demo'), '.');
  }

  return { title: 'Jobs', element, start(given) {
    signal = given;
    repeat(1500, signal, look, (error) => fill(told, error.message)).catch((error) => note(error.message, 'bad'));
  } };
}

export function haystack(job) {
  const notes = Object.entries(job.metadata ?? {}).map(([name, value]) => `${name}=${value}`);
  return [job.job_uuid, job.name, job.model, job.method, job.status, job.reason, ...notes].filter(Boolean).join(' ').toLowerCase();
}

function newRow(job, state, picked) {
  const box = h('input', { type: 'checkbox', 'aria-label': `Compare ${job.name ?? job.job_uuid}`, checked: state.picked.has(job.job_uuid), onchange: () => { if (box.checked) state.picked.add(job.job_uuid); else state.picked.delete(job.job_uuid); picked(); } });
  const cells = Object.fromEntries(['status', 'progress', 'loss', 'time', 'created'].map((name) => [name, h('td', { class: name })]));
  const progress = bar(0, `Progress of ${job.name ?? job.job_uuid}`);
  const step = h('small');
  fill(cells.progress, progress, step);
  const adapter = job.spec?.training?.lora ? ` · LoRA ${job.spec.training.lora.rank}` : '';
  const element = h('tr', { 'data-job': job.job_uuid }, h('td', { class: 'pick' }, box),
    h('td', { class: 'name' }, h('a', { href: `#/jobs/${encodeURIComponent(job.job_uuid)}` }, job.name ?? job.job_uuid), h('small', { class: 'mono' }, job.name ? job.job_uuid : Object.entries(job.metadata).map(([k, v]) => `${k}=${v}`).join(' '))),
    cells.status, h('td', {}, job.model, h('small', {}, job.method, adapter)), cells.progress, cells.loss, cells.time, cells.created);
  let shown = '';
  return { element, update(now) {
    const done = now.progress;
    element.className = now.status;
    setBar(progress, now.status === 'succeeded' ? 100 : done?.percent ?? 0);
    const eta = now.status === 'running' && done?.eta_s ? ` · ${duration(done.eta_s)} left` : '';
    const place = now.queue_position ? `number ${now.queue_position} in the queue` : '';
    const text = place || (done?.total_steps ? `${number(done.step)} / ${number(done.total_steps)}${eta}` : done?.phase ?? '');
    if (step.textContent !== text) step.textContent = text;
    const began = now.started_at ? Date.parse(now.started_at) : null;
    const ended = now.completed_at ? Date.parse(now.completed_at) : LIVE.has(now.status) ? Date.now() : null;
    const texts = { loss: number(now.metrics?.loss), time: began && ended ? duration((ended - began) / 1000) : '–', created: ago(now.created_at) };
    for (const [name, value] of Object.entries(texts)) if (cells[name].textContent !== value) cells[name].textContent = value;
    if (shown !== `${now.status} ${now.reason}`) {
      shown = `${now.status} ${now.reason}`;
      const why = now.reason && now.reason !== now.status && now.reason !== 'completed' ? h('small', {}, now.reason.replaceAll('_', ' ')) : null;
      fill(cells.status, pill(now.status), why);
    }
  } };
}

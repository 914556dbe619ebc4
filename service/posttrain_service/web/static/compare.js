// Curves of several jobs over each other, and a table of what differs between them.

import { button, fill, h, note, number, pill } from './dom.js';
import { get, jobPath } from './api.js';
import { Board, follow } from './charts.js';
import { rows } from './spec.js';

export function compareView(query) {
  const chosen = (query.get('jobs') ?? '').split(',').filter(Boolean);
  const place = h('div');
  const legend = h('div', { class: 'row' });
  const table = h('div', { class: 'card scroll' });
  const pick = h('select', { 'aria-label': 'Add a job', onchange: () => { location.hash = `#/compare?jobs=${[...chosen, pick.value].map(encodeURIComponent).join(',')}`; } });
  const element = h('section', { 'aria-labelledby': 'title' }, h('div', { class: 'row head' }, h('h1', { id: 'title' }, 'Compare'), h('span', { class: 'grow' }), pick), legend, place, h('h2', {}, 'What differs'), table);
  return { title: 'Compare', element, async start(signal) {
    const board = new Board(signal);
    place.append(board.element);
    const recent = await get('post_training/jobs', { limit: 100 }, signal);
    fill(pick, h('option', { value: '' }, 'Add a job…'), recent.data.filter((job) => !chosen.includes(job.job_uuid)).map((job) => h('option', { value: job.job_uuid }, `${job.name ?? job.job_uuid} (${job.model})`)));
    const jobs = [];
    for (const uuid of chosen) {
      try {
        const job = await get(jobPath(uuid), {}, signal);
        jobs.push(job);
        await follow(job, board, signal);
      } catch (error) { if (!signal.aborted) note(error.message, 'bad'); }
    }
    const without = (uuid) => `#/compare?jobs=${chosen.filter((one) => one !== uuid).map(encodeURIComponent).join(',')}`;
    fill(legend, jobs.map((job, at) => {
      const dot = h('i', { class: 'dot', 'aria-hidden': 'true' });
      dot.style.background = `var(--c${(at % 6) + 1})`;
      return h('span', { class: 'tag' }, dot, h('a', { href: `#/jobs/${encodeURIComponent(job.job_uuid)}` }, job.name ?? job.job_uuid), ' ', pill(job.status), button('', () => { location.hash = without(job.job_uuid); }, { kind: 'bare', glyph: 'close', title: `Leave out ${job.name ?? job.job_uuid}` }));
    }));
    fill(table, differences(jobs));
  } };
}

export function differences(jobs) {
  const maps = jobs.map((job) => new Map(rows(job.spec).map((row) => [row.path, row.text])));
  const paths = [...new Set(maps.flatMap((map) => [...map.keys()]))];
  const differ = paths.filter((path) => new Set(maps.map((map) => map.get(path) ?? '–')).size > 1);
  const line = (name, cells) => h('tr', {}, h('th', { scope: 'row' }, name), cells.map((cell) => h('td', { class: 'mono' }, cell)));
  return h('table', {}, h('thead', {}, h('tr', {}, h('th', {}, ''), jobs.map((job) => h('th', { scope: 'col' }, job.name ?? job.job_uuid)))),
    h('tbody', {}, line('newest loss', jobs.map((job) => number(job.metrics?.loss))), differ.map((path) => line(path, maps.map((map) => map.get(path) ?? '–')))));
}

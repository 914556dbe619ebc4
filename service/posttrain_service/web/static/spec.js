// The spec as it was resolved, each value with whether somebody set it or the service chose it.

import { copier, fill, h } from './dom.js';

const ELSEWHERE = { adapter: 'training.lora', validation_split: 'training.validation_split', loggers: 'training.loggers',
  'checkpoints.every_steps': 'training.save_every_steps', 'checkpoints.every_epoch': 'training.save_every_epoch', 'checkpoints.keep_last': 'training.keep_last',
  'checkpoints.keep_best': 'training.keep_best', 'checkpoints.metric': 'training.best_metric' };

export function leaves(value, path = '') {
  if (value === null || typeof value !== 'object' || Array.isArray(value) || !Object.keys(value).length) return [[path, value]];
  return Object.entries(value).flatMap(([name, child]) => leaves(child, path ? `${path}.${name}` : name));
}

// Paths of the resolved spec that the request named; null for a job made before requests were kept.
export function named(spec) {
  if (!spec.asked) return null;
  const found = new Set(['model', 'dataset', ...(spec.validation_dataset ? ['validation_dataset'] : [])]);
  for (const [path] of leaves(spec.asked)) {
    const from = Object.keys(ELSEWHERE).find((name) => path === name || path.startsWith(`${name}.`));
    const to = from ? ELSEWHERE[from] + path.slice(from.length) : path;
    found.add(to);
    if (to.startsWith('method.')) found.add(`training.${to}`);
  }
  return found;
}

export function rows(spec) {
  const set = named(spec);
  const { asked, data, ...resolved } = spec; // data: where the service put the rows
  const chosen = (path) => set && [...set].some((name) => path === name || path.startsWith(`${name}.`) || (name.startsWith(`${path}.`)));
  return leaves(resolved).map(([path, value]) => ({ path, text: typeof value === 'string' ? value : JSON.stringify(value), set: set && !/^(validation_)?dataset\.(report|rows)/.test(path) ? Boolean(chosen(path)) : null })); // a report is found, not set
}

export function specPanel(job) {
  const all = rows(job.spec);
  const body = h('tbody');
  const only = h('input', { type: 'checkbox', onchange: draw });
  const words = h('input', { type: 'search', placeholder: 'Filter…', 'aria-label': 'Filter the spec', oninput: draw });
  function draw() {
    const wanted = all.filter((row) => (!only.checked || row.set) && `${row.path} ${row.text}`.toLowerCase().includes(words.value.toLowerCase()));
    fill(body, wanted.map((row) => h('tr', { class: row.set === false ? 'default' : '' }, h('th', { scope: 'row', class: 'mono' }, row.path), h('td', { class: 'mono wraps' }, row.text), h('td', {}, row.set === null ? '' : h('span', { class: `tag ${row.set ? 'set' : ''}` }, row.set ? 'set' : 'default')))));
  }
  draw();
  return h('div', { class: 'card' }, h('div', { class: 'row tools' }, h('label', { class: 'inline' }, only, 'Only what was set'), h('span', { class: 'grow' }), words, copier(() => JSON.stringify(job.spec, null, 2), 'Copy JSON')),
    h('div', { class: 'scroll' }, h('table', { class: 'spec' }, h('thead', {}, h('tr', {}, ['Field', 'Value', ''].map((name) => h('th', { scope: 'col' }, name)))), body)));
}

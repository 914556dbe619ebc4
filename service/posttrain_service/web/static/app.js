// The frame: navigation, theme, key, and which view the address asks for (#/jobs, #/jobs/ID/log, #/new, ...).

import { ask, button, fill, h, icon, note } from './dom.js';
import { key, onKeyNeeded } from './api.js';
import { jobsView } from './jobs.js';
import { jobView } from './job.js';
import { compareView } from './compare.js';
import { newJobView } from './newjob.js';
import { devicesView } from './devices.js';

const VIEWS = { jobs: (parts, query) => (parts[0] ? jobView(parts, query) : jobsView(query)), compare: (parts, query) => compareView(query), new: (parts, query) => newJobView(query), devices: () => devicesView() };
let leave = null;

export function go(hash) { location.hash = hash; }

function route() {
  const [path, search = ''] = location.hash.replace(/^#\/?/, '').split('?');
  const [name, ...parts] = (path || 'jobs').split('/').map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  const query = new URLSearchParams(search);
  const view = (VIEWS[name] ?? VIEWS.jobs)(parts, query);
  leave?.abort();
  leave = new AbortController();
  const main = document.getElementById('main');
  document.title = `${view.title} · posttrain`;
  for (const link of document.querySelectorAll('nav a')) {
    if (link.dataset.name === name) link.setAttribute('aria-current', 'page'); else link.removeAttribute('aria-current');
  }
  fill(main, view.element);
  view.start?.(leave.signal);
}

function frame() {
  const link = (name, label) => h('a', { href: `#/${name}`, 'data-name': name }, label);
  const theme = button('', toggleTheme, { kind: 'bare', glyph: isDark() ? 'sun' : 'moon', title: 'Light or dark (t)' });
  theme.id = 'theme';
  fill(document.getElementById('top'),
    h('a', { class: 'brand', href: '#/jobs', 'aria-label': 'posttrain, list of jobs' }, h('img', { src: 'dashboard/icon.svg', alt: '', width: 22, height: 22 }), 'posttrain'),
    h('nav', { 'aria-label': 'Main' }, link('jobs', 'Jobs'), link('devices', 'Devices'), link('new', 'New job')),
    h('span', { class: 'grow' }),
    button('', help, { kind: 'bare', glyph: 'help', title: 'Keyboard (?)' }),
    button('', changeKey, { kind: 'bare', glyph: 'key', title: 'API key' }), theme);
}

const isDark = () => document.documentElement.dataset.theme === 'dark';

function toggleTheme() {
  const chosen = isDark() ? 'light' : 'dark';
  document.documentElement.dataset.theme = chosen;
  try { localStorage.setItem('posttrain-theme', chosen); } catch { /* storage is blocked: it holds until the page is left */ }
  fill(document.getElementById('theme'), icon(isDark() ? 'sun' : 'moon'));
  document.dispatchEvent(new Event('themechange'));
}

async function askKey(message, sent) {
  const input = h('input', { type: 'password', id: 'api-key', autocomplete: 'off', spellcheck: 'false', required: true, placeholder: 'pt_…' });
  const body = h('div', { class: 'field' }, h('label', { for: 'api-key' }, 'API key'), input,
    h('small', {}, 'It stays in this tab until the tab is closed. Whoever runs the server makes one by ', h('code', {}, 'posttrain keys create'), '.'));
  const answered = ask({ title: sent ? 'This key is not good' : 'This server needs a key', text: message, ok: 'Use this key', body });
  input.focus();
  if (!(await answered) || !input.value.trim()) return false;
  key.set(input.value.trim());
  return true;
}

async function changeKey() {
  const had = key.get();
  if (had && await ask({ title: 'Forget the key?', text: 'This tab has an API key. Without it nothing is shown any more where the server needs one.', ok: 'Forget it', kind: 'danger' })) {
    key.set(null);
    location.reload();
  } else if (!had && await askKey('Give the key that this page should send.', null)) route();
}

function help() {
  const rows = [['/', 'search'], ['n', 'new job'], ['j', 'list of jobs'], ['d', 'devices and queue'], ['t', 'light or dark'], ['double click', 'in a chart: all of it again'], ['?', 'this']];
  ask({ title: 'Keyboard', ok: 'Good', body: h('dl', { class: 'keys' }, rows.map(([name, what]) => [h('dt', {}, h('kbd', {}, name)), h('dd', {}, what)])) });
}

document.addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest('input, textarea, select, dialog')) return;
  const actions = { '/': () => document.querySelector('input[type=search]')?.focus(), n: () => go('#/new'), j: () => go('#/jobs'), d: () => go('#/devices'), t: toggleTheme, '?': help };
  if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
});
document.querySelector('[data-skip]').addEventListener('click', (event) => { event.preventDefault(); document.getElementById('main').focus(); });
addEventListener('hashchange', route);
addEventListener('unhandledrejection', (event) => {
  event.preventDefault(); // told here, and a view that was left breaks its requests off: that is no fault
  if (event.reason?.name !== 'AbortError') note(event.reason?.message ?? String(event.reason), 'bad');
});
onKeyNeeded(askKey);
frame();
route();

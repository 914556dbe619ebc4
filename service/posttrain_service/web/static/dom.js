// Elements and texts. Children are nodes or become text nodes: there is no way here to turn a string into markup.

export function h(tag, attributes = {}, ...children) {
  const element = tag === 'svg' || tag === 'path' || tag === 'circle' || tag === 'polyline'
    ? document.createElementNS('http://www.w3.org/2000/svg', tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'value' || name === 'checked' || name === 'selected') element[name] = value;
    else element.setAttribute(name, value === true ? '' : String(value));
  }
  return put(element, ...children);
}

export function put(element, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren();
  return put(element, ...children);
}

// Text that changes often: the node is touched only where it differs, so a selection or a screen reader is left alone.
export function say(element, text) {
  if (element.textContent !== String(text)) element.textContent = String(text);
}

const ICONS = {
  sun: 'M12 4V2M12 22v-2M4 12H2M22 12h-2M6.3 6.3 4.9 4.9M19.1 19.1l-1.4-1.4M6.3 17.7l-1.4 1.4M19.1 4.9l-1.4 1.4M12 16a4 4 0 1 0 0-8 4 4 0 0 0 0 8Z',
  moon: 'M20 14.5A8 8 0 0 1 9.5 4 8 8 0 1 0 20 14.5Z',
  key: 'M15 9h.01M21 9a6 6 0 0 1-8.3 5.5L11 16H9v2H7v2H3v-4l6.5-6.5A6 6 0 1 1 21 9Z',
  search: 'M11 18a7 7 0 1 0 0-14 7 7 0 0 0 0 14ZM20 20l-4-4',
  plus: 'M12 5v14M5 12h14',
  down: 'M12 4v12M7 12l5 5 5-5M5 20h14',
  up: 'M6 15l6-6 6 6',
  below: 'M6 9l6 6 6-6',
  copy: 'M9 9h10v10H9zM5 15V5h10',
  close: 'M6 6l12 12M18 6 6 18',
  help: 'M9.5 9a2.5 2.5 0 1 1 3.5 2.3c-.7.3-1 .9-1 1.7M12 16.5h.01M12 21a9 9 0 1 0 0-18 9 9 0 0 0 0 18Z',
};

export function icon(name) {
  const svg = h('svg', { viewBox: '0 0 24 24', width: 16, height: 16, fill: 'none', stroke: 'currentColor', 'stroke-width': 1.8, 'stroke-linecap': 'round', 'stroke-linejoin': 'round', 'aria-hidden': 'true' });
  return put(svg, h('path', { d: ICONS[name] }));
}

export function button(label, onclick, { kind = '', glyph = null, title = null, pressed = null } = {}) {
  return h('button', { type: 'button', class: `btn ${kind}`, onclick, title, 'aria-pressed': pressed, 'aria-label': label === '' ? title : null },
    glyph && icon(glyph), label);
}

export function pill(status) {
  return h('span', { class: `pill s-${status}` }, h('i', { 'aria-hidden': 'true' }), status);
}

export function bar(percent, label = 'progress') {
  const element = h('div', { class: 'bar', role: 'progressbar', 'aria-valuemin': 0, 'aria-valuemax': 100, 'aria-label': label }, h('i'));
  setBar(element, percent);
  return element;
}

export function setBar(element, percent) {
  const known = Number.isFinite(percent);
  element.classList.toggle('unknown', !known);
  if (known) element.setAttribute('aria-valuenow', Math.round(percent)); else element.removeAttribute('aria-valuenow');
  element.firstChild.style.width = `${known ? Math.max(0, Math.min(100, percent)) : 0}%`;
}

export function when(iso) {
  if (!iso) return '–';
  return h('time', { datetime: iso, title: new Date(iso).toLocaleString() }, ago(iso));
}

// A dialog that answers; Escape and a click beside it are a no.
export function ask({ title, text, ok = 'OK', kind = 'primary', body = null }) {
  return new Promise((resolve) => {
    const form = h('form', { method: 'dialog' }, h('h2', { id: 'ask-title' }, title), text && h('p', {}, text), body,
      h('div', { class: 'row end' }, h('button', { type: 'button', class: 'btn', onclick: () => dialog.close('no') }, 'Back'), h('button', { class: `btn ${kind}`, value: 'yes' }, ok)));
    const dialog = h('dialog', { 'aria-labelledby': 'ask-title', onclick: (event) => { if (event.target === dialog) dialog.close('no'); } }, form);
    dialog.addEventListener('close', () => { dialog.remove(); resolve(dialog.returnValue === 'yes'); });
    document.body.append(dialog);
    dialog.showModal();
  });
}

export function note(text, kind = '') {
  const element = h('div', { class: `note ${kind}` }, h('span', {}, text), button('', () => element.remove(), { kind: 'bare', glyph: 'close', title: 'Close' }));
  document.getElementById('notes').append(element);
  if (kind !== 'bad') setTimeout(() => element.remove(), 6000);
}

export function copier(text, label = 'Copy') {
  return button(label, async () => { await navigator.clipboard.writeText(text()); note('Copied.'); }, { glyph: 'copy', kind: 'small' });
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–';
  const size = Math.abs(value);
  if (Number.isInteger(value)) return value.toLocaleString('en');
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e/, 'e');
  return value.toLocaleString('en', { maximumSignificantDigits: Math.max(digits, Math.ceil(Math.log10(size + 1))) });
}

export function bytes(value) {
  if (!Number.isFinite(value)) return '–';
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${value < 10 && at ? value.toFixed(1) : Math.round(value)} ${units[at]}`;
}

export function duration(seconds) {
  if (!Number.isFinite(seconds) || seconds < 0) return '–';
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const [d, hh, m] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
  if (d) return `${d} d ${hh} h`;
  if (hh) return `${hh} h ${m} min`;
  return m >= 10 ? `${m} min` : `${m} min ${Math.floor(seconds % 60)} s`;
}

export function ago(iso) {
  const seconds = (Date.now() - Date.parse(iso)) / 1000;
  if (!Number.isFinite(seconds)) return '–';
  if (Math.abs(seconds) < 5) return 'now';
  const units = [[86400, 'd'], [3600, 'h'], [60, 'min'], [1, 's']];
  const [size, unit] = units.find(([of]) => Math.abs(seconds) >= of);
  const count = Math.floor(Math.abs(seconds) / size);
  return seconds > 0 ? `${count} ${unit} ago` : `in ${count} ${unit}`;
}
